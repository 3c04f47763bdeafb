"""The Energy Transformer: one energy of the whole sequence, its exact gradient, and its descent."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nrgpt import ModelConfig
from nrgpt.dynamics.descent import check_descent
from nrgpt.model.certificate import Guarantee
from nrgpt.model.sequence import SequenceAttention, head_sizes

from .. import reference
from ..models import COUPLINGS, NORMS, config, randomised, relative
from ..models import tokens as make_tokens
from ..models import weights as make_weights

SIGHTS = ("others", "all", "earlier")
ET = {"block": "et", "feedforward": "memory"}
PUBLISHED = {**ET, "rate": "scalar", "learn_gamma": False}


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("safeguard", ["none", "cone"])
def test_the_force_is_the_gradient_of_the_sum(sight, coupling, safeguard):
    """Of the energy that the plain implementation writes down, over all tokens at once."""
    cfg = config(**ET, sight=sight, coupling=coupling, norm="none", safeguard=safeguard)
    model = randomised(cfg)
    w = make_weights(model)
    g = torch.randn(3, 7, cfg.width, dtype=torch.float64, requires_grad=True)
    seen = model.energy_block.plan().observe(g.detach(), 0)
    E = reference.sequence_energy(cfg, w, g)
    assert relative(seen.energy, E) < 1e-12
    assert relative(seen.force, -torch.autograd.grad(E.sum(), g)[0]) < 1e-12
    assert relative(sum(model.energies(g.detach()).values()), E) < 1e-12


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("sight", SIGHTS)
def test_against_the_reference(norm, sight):
    cfg = config(**PUBLISHED | {"learn_gamma": norm == "none"}, sight=sight, norm=norm, tied=False)
    model = randomised(cfg, std=0.1 if norm == "none" else 0.3)
    w = make_weights(model)
    idx, targets = make_tokens(cfg)
    for steps in (1, 3, 5):
        assert relative(model(idx, steps=steps)[0], reference.logits(cfg, w, idx, steps)) < 1e-10
    model(idx, targets)[1].backward()
    reference.loss(cfg, w, idx, targets).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert relative(parameter.grad, w[name].grad) < 1e-8, name


@pytest.mark.parametrize("sight", SIGHTS)
def test_no_sight_is_causal(sight):
    """A token feels later ones, even where none attends to a later one: it is a key of theirs."""
    model = randomised(config(**PUBLISHED, sight=sight))
    idx, _ = make_tokens(model.cfg)
    changed = idx.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 11
    before, after = model(idx)[0], model(changed)[0]
    assert ((before - after)[:, :6].norm(dim=-1) > 1e-6).all()


def test_without_the_force_on_keys_it_is_nrgpt_and_no_gradient():
    """A causal mask, and the force on queries alone: NRGPT's strict mask. As a field of the whole
    sequence it has no potential, for its Jacobian is not symmetric; the full force's is."""
    cfg = config(**ET, sight="earlier", norm="none")
    model = randomised(cfg)
    nrgpt = randomised(config(feedforward="memory", norm="none"))
    nrgpt.load_state_dict(model.state_dict())
    g = torch.randn(1, 6, 9, dtype=torch.float64)

    def asymmetry(model):
        def force(g):
            return model.energy_block.plan().observe(g, 0).force

        with sdpa_kernel(SDPBackend.MATH):
            J = torch.func.jacrev(force)(g).reshape(g.numel(), g.numel())
        return relative(J, J.T)

    assert asymmetry(model) < 1e-12
    assert asymmetry(nrgpt) > 0.1
    assert relative(sum(model.energies(g).values()), sum(nrgpt.energies(g).values())) < 1e-12


def test_the_sum_of_nrgpts_energies_may_rise_while_none_rises_by_its_own_step():
    rose, steps = 0, 0
    for seed in range(4):
        torch.manual_seed(seed)
        cfg = config(feedforward="memory", rate="gamma", learn_alpha=False, steps=8)
        model = randomised(cfg, std=0.5)
        idx, _ = make_tokens(cfg, batch=8, length=13)
        assert check_descent(model, idx).within.relative < 1e-12
        E = torch.stack([sum(model.energies(x).values()).sum(-1) for x in model.states(idx)])
        rose, steps = rose + int((E.diff(dim=0) > 1e-9).sum()), steps + E[1:].numel()
    assert rose > 0.01 * steps


def repelling(cfg, rank=None):
    """J_h = -K_h^T K_h: tokens push one another away, which no energy can do that is concave."""
    model = randomised(cfg, std=0.0)
    with torch.no_grad():
        model.tokens.normal_()
        model.positions.normal_()
        term = model.energy_block.terms["attention"]
        term.W_K.normal_()
        term.W_K[rank or cfg.width :] = 0
        term.W_Q.copy_(-term.W_K)
    return model


@pytest.mark.parametrize("sight", SIGHTS)
def test_small_steps_lower_the_energy_and_large_ones_need_the_cone(sight):
    rises = {}
    for name, options in {
        "small": {"rate_scale": 1e-3},
        "large": {"rate_scale": 1.0},
        "cone": {"rate_scale": 1.0, "safeguard": "cone"},
    }.items():
        torch.manual_seed(1)
        cfg = config(**PUBLISHED, sight=sight, norm="rmsnorm", heads=1, steps=8, **options)
        model = repelling(cfg, rank=2)
        idx, _ = make_tokens(cfg, batch=16, length=3)
        rises[name] = check_descent(model, idx).parallel.relative
    assert rises["small"] < 0
    assert rises["cone"] < 1e-12
    assert rises["large"] > 0.1


CONES = [
    {"rate": "free", "rate_scale": 3.0},
    {"norm": "rmsnorm", "rate": "free_per_term"},
    {"norm": "none", "rate": "scalar", "init_std": 0.2},
    {"coupling": "full", "margin": 0.0},
    {"feedforward": "ff2w", "activation": "gelu"},
]


@pytest.mark.parametrize("fields", CONES, ids=str)
@pytest.mark.parametrize("sight", SIGHTS)
def test_the_cone_keeps_the_sum_from_rising(fields, sight):
    """With random weights, any eta, any norm: no step of all tokens at once raises the energy."""
    for seed in range(3):
        torch.manual_seed(seed)
        cfg = config(**{**ET, "safeguard": "cone", "steps": 6, **fields}, sight=sight)
        model = randomised(cfg, std=0.3)
        found = model.certificate()
        assert found
        assert "one energy for the whole sequence" in str(found)
        idx, _ = make_tokens(cfg, batch=4, length=13)
        assert check_descent(model, idx).parallel.relative < 1e-10


def test_the_bound_holds_for_any_move_of_all_tokens():
    """E(n') <= E(n) - f . d + sum_A L_A/2 |d_A|^2, near and far."""
    cfg = config(**ET, norm="none", safeguard="cone")
    for model in (randomised(cfg), repelling(cfg)):
        plan = model.energy_block.plan()
        for scale in (1e-3, 0.1, 1.0, 10.0):
            g = torch.randn(50, 7, 9, dtype=torch.float64)
            look = plan.observe(g, 0)
            f, E = look.forces["attention"], look.energies["attention"].sum(-1)
            L = plan.cone.curvature(g)
            d = scale * torch.randn_like(g)
            beyond = plan.energies(g + d)["attention"].sum(-1) - E + (f * d).sum((-2, -1))
            allowed = (L / 2 * d.square()).sum((-2, -1))
            assert (beyond <= allowed * (1 + 1e-9) + 1e-9).all()
        # On average over tokens it is 2 sum_h alpha_h |J_h|, however much attention any one gets.
        sizes = head_sizes(plan.terms[0].term, plan.norm)
        assert relative(L.mean((1, 2)), (2 * sizes.sum()).expand(50)) < 1e-12


def test_how_tight_the_bound_is():
    """The largest eigenvalue of L^(-1/2) Hessian L^(-1/2) is at most 1. With one head, and tokens
    that are alike and repel one another, it is 1."""
    model = repelling(config(**ET, norm="none", heads=1, safeguard="cone", sight="all"))
    plan, tightest = model.energy_block.plan(), []
    for size in (1.0, 0.0):
        g = size * torch.randn(1, 7, 9, dtype=torch.float64)

        def energy(g):
            return plan.energies(g)["attention"].sum()

        H = torch.func.hessian(energy)(g).reshape(63, 63)
        root = plan.cone.curvature(g).expand(1, 7, 9).flatten().rsqrt()
        tightest.append(torch.linalg.eigvalsh(root[:, None] * H * root)[-1].item())
    assert 0 < tightest[0] < 1
    assert tightest[1] == pytest.approx(1, rel=0.01)  # the rest is bilinear_size's


def test_sizes_of_heads_are_bounds_on_spectral_norms():
    model = randomised(config(**ET, safeguard="cone"))
    term, norm = model.energy_block.terms["attention"], model.energy_block.norm
    assert isinstance(term, SequenceAttention)
    A, B = (norm.through(W) for W in term.pairs())
    exact = term.strength() * torch.linalg.matrix_norm(A.mT @ B, 2)
    sizes = head_sizes(term, norm)
    assert (sizes >= exact).all()
    assert (sizes <= 1.02 * exact).all()


def test_certificates():
    small = randomised(config(**PUBLISHED), std=0.1).certificate()
    assert small.level is Guarantee.SMALL_STEPS
    assert [finding.part for finding in small.blame] == ["attention of the sequence, sight others"]
    free = randomised(config(**ET)).certificate()
    assert free.level is Guarantee.NONE
    assert "in the forward pass (one energy" in str(small)
    model = randomised(config(**PUBLISHED, safeguard="cone"))
    idx, _ = make_tokens(model.cfg)
    found = model.certificate(idx=idx)
    assert found
    assert "in the forward pass  no step" in str(found)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mask": "inclusive"}, "mask = 'inclusive': must be left alone: block = 'et'"),
        ({"past": "settled"}, "past = 'settled': must be 'moving' with block = 'et'"),
        ({"write": "free"}, "write = 'free': must be 'tied' with block = 'et'"),
        ({"prelude": 1}, "prelude = 1: must be left alone: block = 'et'"),
        ({"sight": "later"}, "sight = 'later': must be one of"),
    ],
)
def test_what_it_cannot_be_combined_with(fields, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig(**{"block": "et", **fields})


def test_it_completes_texts_and_does_not_continue_them():
    model = randomised(config(**PUBLISHED))
    with pytest.raises(ValueError, match=r"block = 'et': .*complete"):
        model.generate([[1, 2]], max_new_tokens=2)
