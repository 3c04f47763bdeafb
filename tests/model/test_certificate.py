"""The paper's propositions, corrected, and the discrete theorem (see docs/equations.md)."""

import math

import pytest
import torch

from nrgpt import Guarantee

from ..models import config, forces, randomised, relative

CONVEX = [
    {"feedforward": "memory", "potential": "relu2"},
    {"feedforward": "memory", "potential": "softplus"},
    {"feedforward": "memory", "potential": "softplus2"},
    {"feedforward": "ff1", "activation": "relu"},
]


def total_energy(model, x):
    return sum(model.energies(x).values())


def move_last_token(model, x, t=0):
    """One step of the last token with its past frozen."""
    moved = x.clone()
    moved[:, -1] += model.energy_block.plan().observe(x, t).update[:, -1].detach()
    return moved


def rises(model, x, steps=5):
    """Largest relative rise of the last token's energy over the steps, for each sample."""
    worst = torch.full((len(x),), -math.inf, dtype=x.dtype)
    before = total_energy(model, x)[:, -1]
    for t in range(steps):
        x = move_last_token(model, x, t)
        after = total_energy(model, x)[:, -1]
        worst = torch.maximum(worst, (after - before) / before.abs().clamp(min=1))
        before = after
    return worst.detach()


def change_along_the_flow(model, x):
    """dE/dt of the last token at dx/dt = its update, with its past frozen."""
    x = x.clone().requires_grad_()
    slope = torch.autograd.grad(total_energy(model, x)[:, -1].sum(), x)[0][:, -1]
    return (slope * (move_last_token(model, x) - x)[:, -1]).sum(-1).detach()


def certified(norm, rate, feedforward, **fields):
    model = randomised(config(norm=norm, rate=rate, bias=True, **feedforward, **fields))
    with torch.no_grad():
        model.energy_block.energy.terms["attention"].alpha.abs_()
    return model


@pytest.mark.parametrize("feedforward", CONVEX, ids=lambda f: "-".join(f.values()))
@pytest.mark.parametrize("rate", ["gamma", "gamma_per_step"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
def test_discrete_theorem(norm, rate, feedforward, eps):
    """Frozen past, concave energy, eta = c Gamma: no step of any size raises the energy."""
    for c in (0.01, 1.0, 100.0):
        model = certified(norm, rate, feedforward, norm_eps=eps)
        with torch.no_grad():
            model.energy_block.rate.log_c.fill_(math.log(c))
        assert model.certificate(), str(model.certificate())
        x = torch.randn(1000, 6, model.cfg.width, dtype=torch.float64)
        assert rises(model, x).max() <= 1e-10


@pytest.mark.parametrize("rate", ["identity", "scalar", "psd_skew", "psd_skew_per_step", "state"])
def test_discrete_theorem_without_norm(rate):
    """Without a norm, a positive semi-definite symmetric part of eta is enough."""
    options = {"identity": {}, "psd_skew": {"rate_rank": 4, "rate_scale": 3.0}}
    model = certified("none", rate, CONVEX[1], **options.get(rate, {"rate_scale": 3.0}))
    assert model.certificate(), str(model.certificate())
    assert rises(model, torch.randn(1000, 6, 9, dtype=torch.float64)).max() <= 1e-10


def test_ff2w_may_rise():
    """The counterexample: the same rate and norm with FF2W go up for some tokens."""
    model = certified("layernorm", "gamma", {"feedforward": "ff2w"})
    with torch.no_grad():
        model.energy_block.rate.log_c.fill_(math.log(10.0))
    assert model.certificate().level is Guarantee.SMALL_STEPS
    assert rises(model, torch.randn(1000, 6, 9, dtype=torch.float64)).max() > 0.1


def test_ff1_with_gelu_may_rise():
    """GELU^2 is not convex: one hidden unit is enough to see it."""
    model = certified("rmsnorm", "gamma", {"feedforward": "ff1"})
    block = model.energy_block
    with torch.no_grad():
        block.energy.terms["feedforward"].W[1:] = 0
        block.energy.terms["feedforward"].b.zero_()
        block.energy.terms["attention"].alpha.zero_()
        block.norm.gamma.fill_(1)
        block.rate.log_c.fill_(math.log(10.0))
    assert model.certificate().level is Guarantee.SMALL_STEPS
    assert rises(model, torch.randn(2000, 2, 9, dtype=torch.float64)).max() > 1e-3


def test_unequal_gamma_needs_gamma_in_the_rate():
    """With gamma != 1, eta = 1 is no descent direction, whatever the paper's figure assumes."""
    model = certified("layernorm", "identity", CONVEX[0])
    assert model.certificate().level is Guarantee.NONE
    assert "rate" in model.certificate().blame[0].part
    worst = rises(model, torch.randn(1000, 6, 9, dtype=torch.float64))
    assert (worst > 1e-3).sum() > 10


def test_state_rate_descends_in_small_steps_only():
    for scale, expect_rise in ((1e-4, False), (1e3, True)):
        model = certified("layernorm", "state", CONVEX[0], rate_scale=scale)
        with torch.no_grad():
            model.energy_block.rate.W_M.zero_()
            model.energy_block.rate.b_M.fill_(math.log(math.expm1(scale)) if scale < 10 else scale)
        assert model.certificate().level is Guarantee.SMALL_STEPS
        worst = rises(model, torch.randn(1000, 6, 9, dtype=torch.float64))
        assert (worst > 1e-10).any() == expect_rise


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("feedforward", ["ff1", "ff2w", "ff2", "memory"])
def test_proposition_1(norm, feedforward):
    """In continuous time, with the past frozen, dE/dt = -(c/r) v^T P v <= 0, v = -Gamma dE/dg."""
    model = randomised(config(norm=norm, rate="gamma", feedforward=feedforward))
    block = model.energy_block
    x = torch.randn(50, 6, 9, dtype=torch.float64)
    dE = change_along_the_flow(model, x)
    force = sum(forces(model, x).values())
    v = (block.norm.gamma * force)[:, -1]
    last = x[:, -1]
    vPv = (v * block.norm.project(last, v)).sum(-1, keepdim=True)
    expected = -block.rate.log_c.exp() / block.norm.scale(last) * vPv
    assert relative(dE, expected.squeeze(-1)) < 1e-10
    assert (dE < 0).all()


def test_proposition_2():
    """Without a norm, dE/dt = -f^T eta_+ f: negative if the symmetric part of eta is positive."""
    model = randomised(config(norm="none", rate="psd_skew"), std=0.1)
    block = model.energy_block
    x = torch.randn(50, 6, 9, dtype=torch.float64)
    dE = change_along_the_flow(model, x)
    f = sum(forces(model, x).values())[:, -1]
    U, V = block.rate.U, block.rate.V
    assert (V - V.T).norm() > 0.1  # a skew part is there, and does nothing
    assert relative(dE, -(f @ U.T).square().sum(-1)) < 1e-10
    assert (dE < 0).all()


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_energies_are_bounded(norm):
    """With a norm ||g|| <= max|gamma| sqrt(D) + ||delta|| =: G (the paper forgets the sqrt(D) and
    the quadratic term), and from it bounds for every x, however far away."""
    cfg = config(norm=norm, coupling="full", feedforward="ff1", learn_alpha=False)
    model = randomised(cfg)
    terms = model.energy_block.energy.terms
    gamma = model.energy_block.norm.gamma
    delta = model.energy_block.norm.delta.norm() if norm == "layernorm" else 0.0
    G = gamma.abs().max() * cfg.width**0.5 + delta
    A = torch.arange(7)
    couplings = sum(torch.linalg.matrix_norm(J, 2) for J in terms["attention"].J)
    W = torch.linalg.matrix_norm(terms["feedforward"].W, 2)
    lipschitz_gelu = 1.13
    for size in (1e-3, 1.0, 1e6):
        x = size * torch.randn(200, 7, 9, dtype=torch.float64)
        energies = model.energies(x)
        centre = -cfg.heads * torch.log(A.clamp(min=1)) / cfg.score_scale
        distance = (energies["attention"] - centre).abs()
        assert (distance <= couplings * G**2).all()
        assert (energies["attention"][:, 0] == 0).all()
        assert (energies["feedforward"] <= 0).all()
        assert (energies["feedforward"] >= -((lipschitz_gelu * W * G) ** 2)).all()


def test_certificates_are_not_fooled_by_large_entries_or_nan():
    none, every = Guarantee.NONE, Guarantee.EVERY_STEP
    skew = torch.zeros(9, 9, dtype=torch.float64)
    skew[0, 1], skew[1, 0] = 1e6, -1e6
    uneven = torch.full((9,), -1.0).double().diag()
    uneven[0, 0] = 1e7
    eye = torch.eye(9, dtype=torch.float64)
    for eta, level in ((skew - 0.5 * eye, none), (uneven, none), (skew + eye, every)):
        model = randomised(config(norm="none", rate="free", feedforward="memory"), std=0.0)
        with torch.no_grad():
            model.energy_block.rate.eta.copy_(eta)
        assert model.certificate().level is level
    model = randomised(config(rate="free", feedforward="memory"), std=0.0)
    with torch.no_grad():
        model.energy_block.norm.gamma[1:] = 1e-7
        model.energy_block.rate.eta.copy_(model.energy_block.norm.gamma.diag())
        assert model.certificate()
        model.energy_block.rate.eta[1, 1] *= -1
        assert model.certificate().level is none
        model.energy_block.rate.eta[1, 1] = math.nan
        assert model.certificate().level is none
    model = randomised(config(rate="gamma", feedforward="memory"), std=0.0)
    with torch.no_grad():
        model.energy_block.energy.terms["attention"].alpha[0] = math.nan
    assert not model.certificate()


def test_an_eta_for_each_term_is_certified_only_where_they_agree():
    """2 Gamma for attention and Gamma for the rest lower 2 E_AT + E_FF, not the energy."""
    model = randomised(config(rate="free_per_term", feedforward="memory"), std=0.0)
    rate, gamma = model.energy_block.rate, model.energy_block.norm.gamma
    with torch.no_grad():
        gamma.uniform_(0.5, 2)
        rate.eta_attention.copy_(2 * gamma.diag())
        rate.eta_feedforward.copy_(2 * gamma.diag())
        assert model.certificate().level is Guarantee.EVERY_STEP
        rate.eta_feedforward.copy_(gamma.diag())
    assert model.certificate().level is Guarantee.NONE
    (culprit,) = model.certificate().blame
    assert culprit.part == "rate FreePerTerm"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_holds_by_design_holds_in_every_precision(dtype):
    for norm, rate in (("layernorm", "gamma"), ("rmsnorm", "gamma_per_step"), ("none", "psd_skew")):
        model = randomised(config(norm=norm, rate=rate, feedforward="memory"), std=0.1)
        with torch.no_grad():
            model.energy_block.energy.terms["attention"].alpha.abs_()
        assert model.to(dtype).certificate(), model.certificate()


def test_certificates_name_the_culprit():
    def level(**fields):
        return randomised(config(**fields), std=0.0).certificate().level

    assert level(rate="gamma", feedforward="memory") is Guarantee.EVERY_STEP
    assert level(rate="gamma", feedforward="memory", potential="gelu") is Guarantee.SMALL_STEPS
    assert level(rate="gamma", feedforward="memory", mask="inclusive") is Guarantee.SMALL_STEPS
    assert level(rate="gamma", feedforward="memory", mask="released") is Guarantee.NONE
    assert level(rate="free", rate_init="random", feedforward="memory") is Guarantee.NONE
    assert level(block="gpt") is Guarantee.NONE

    model = randomised(config(rate="gamma", feedforward="memory", feedforward_scale=True), std=0.0)
    assert model.certificate()
    with torch.no_grad():
        model.energy_block.energy.terms["attention"].alpha[1] = -0.1
    (culprit,) = model.certificate().blame
    assert "attention" in culprit.part
    assert "alpha" in culprit.why
    with torch.no_grad():
        model.energy_block.energy.terms["attention"].alpha[1] = 0.1
        model.energy_block.energy.terms["feedforward"].feedforward_scale.neg_()
    (culprit,) = model.certificate().blame
    assert "scale" in culprit.why
    assert culprit.part in str(model.certificate())
