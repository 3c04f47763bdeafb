"""The cone against a second implementation, and against energies."""

import itertools
import math
from contextlib import nullcontext

import pytest
import torch

from nrgpt import Guarantee, LanguageModel
from nrgpt.dynamics.adaptive import AdaptiveDecoder
from nrgpt.dynamics.relax import Stop
from nrgpt.model.norm import make_norm
from nrgpt.model.past import WholeText
from nrgpt.model.safeguard import Cone
from tests.models import FREE, NORMS, RATES, SETTLED, config, randomised, relative, tokens

CONCAVE = (
    {"feedforward": "memory", "potential": "relu2"},
    {"feedforward": "memory", "potential": "softplus"},
    {"feedforward": "memory", "potential": "softplus2"},
    {"feedforward": "ff1", "activation": "relu"},
)


def random_norm(kind, eps=1e-5):
    norm = make_norm(config(norm=kind, **({} if kind == "none" else {"norm_eps": eps}))).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(1.5 * torch.randn_like(parameter))  # gammas of either sign
    return norm


def by_bisection(norm, x, y, force):
    """The least push along the force, found by trial: nothing of the formula is used."""

    def is_inside(push):
        return ((norm(y + push * e) - norm(x)) * force).sum(-1, keepdim=True) >= 0

    u = force if norm.gamma is None else norm.gamma * force
    e = norm.centred(u)
    e = e / e.norm(dim=-1, keepdim=True)
    low = torch.zeros_like(x[..., :1])
    high = 1e3 * (1 + x.norm(dim=-1, keepdim=True) + y.norm(dim=-1, keepdim=True))
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            torch.where(is_inside(middle), low, middle),
            torch.where(is_inside(middle), middle, high),
        )
    return torch.where(is_inside(torch.zeros_like(low)), y, y + high * e)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
@pytest.mark.parametrize("kind", NORMS)
def test_the_least_push(kind, eps):
    norm = random_norm(kind, eps)
    x, y, force = (torch.randn(500, 9, dtype=torch.float64) for _ in range(3))
    expected = by_bisection(norm, x, y, force)
    found = Cone(norm)(x, y, force)
    reachable = (expected - y).norm(dim=-1) < 100  # further away bisection is not exact
    assert reachable.double().mean() > 0.9
    assert relative(found[reachable], expected[reachable]) < 1e-8
    assert ((found - y).norm(dim=-1) > 0).double().mean() > 0.2


@pytest.mark.parametrize("fields", CONCAVE, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_no_energy_rises(kind, fields):
    """10,000 tokens, updates from 1e-4 to 1e4, all terms together, the past as it is."""
    model = randomised(config(norm=kind, **fields), std=0.3 if kind != "none" else 0.1)
    with torch.no_grad():
        model.energy_block.terms["attention"].alpha.abs_()
    plan = model.energy_block.plan()
    x = torch.randn(1000, 10, 9, dtype=torch.float64)
    past = x.clone()
    seen = plan.observe(x, 0)
    for scale in (1e-4, 1e-2, 1.0, 1e2, 1e4):
        y = x + scale * torch.randn_like(x)
        moved = Cone(plan.norm)(x, y, seen.force)
        for A in range(1, 10):  # each token alone, its past where it was
            tried = past.clone()
            tried[:, A] = moved[:, A]
            after = sum(plan.energies(tried).values())[:, A]
            before = seen.energy[:, A]
            assert (after <= before + 1e-9 * before.abs().clamp(min=1)).all(), (scale, A)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
@pytest.mark.parametrize("curvature", [None, 0.5, 50.0])
@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_edges_are_finite(kind, eps, curvature, margin):
    norm = random_norm(kind, eps)
    bound = None if curvature is None else torch.tensor(curvature, dtype=torch.float64)
    cone = Cone(norm, bound, margin)
    x = torch.randn(6, 9, dtype=torch.float64)
    u = x if norm.gamma is None else x / norm.gamma  # a force whose u is along x
    cases = {
        "no force": (x, torch.randn_like(x), torch.zeros_like(x)),
        "along the force": (x, torch.randn_like(x), u),
        "against the force": (x, torch.randn_like(x), -u),
        "no move": (x, x, torch.randn_like(x)),
        "all numbers equal": (torch.ones_like(x), torch.randn_like(x), torch.randn_like(x)),
        "to zero": (x, torch.zeros_like(x), torch.randn_like(x)),
    }
    for name, (start, end, force) in cases.items():
        leaves = [v.clone().requires_grad_() for v in (start, end, force)]
        found = cone(*leaves)
        assert torch.isfinite(found).all(), name
        gain = ((norm(found) - norm(start)) * force).sum(-1)
        is_defined = gain.isfinite()  # without eps, the norm of zero is not
        assert is_defined.all() or eps == 0
        assert (gain[is_defined] >= -1e-9).all(), name
        if name == "no force" and bound is None:
            assert torch.equal(found, end)
        assert found.abs().max() < 1e6, name
        for gradient in torch.autograd.grad(found.sum(), leaves, allow_unused=True):
            assert gradient is None or torch.isfinite(gradient).all(), name


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("kind", NORMS)
def test_a_safeguarded_model(kind, rate):
    """Trains, decodes with the cache, watches as it moves, and is certified whatever its rate."""
    cfg = config(norm=kind, rate=rate, safeguard="cone", learn_alpha=False, **CONCAVE[0])
    model = randomised(cfg, std=0.3 if kind != "none" else 0.05)
    assert model.certificate()
    idx, targets = tokens(cfg)
    model(idx, targets)[1].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    plan = model.plan().at(0)
    x = model.embed(idx).detach()
    for t in range(4):
        seen, moved = plan.observe(x, t), plan.move(x, t)
        assert relative(x + seen.update, moved) < 1e-10
        x = moved
    assert model.certificate(idx=idx).check.frozen.relative < 1e-9
    new = model.generate(idx.tolist(), max_new_tokens=4)
    assert new == model.generate(idx.tolist(), max_new_tokens=4, cache="none")


def test_what_is_not_concave_is_not_certified():
    for fields in ({"feedforward": "ff2"}, {"feedforward": "ff2w", "activation": "relu"}):
        found = LanguageModel(config(safeguard="cone", **fields)).certificate()
        # On the cone's border nothing falls to first order, so not even small steps are safe.
        assert found.level is Guarantee.NONE


def test_a_model_without_it_may_rise():
    """Or the tests above would show nothing."""
    rises = []
    for safeguard, seed in itertools.product(("none", "cone"), range(3)):
        torch.manual_seed(seed)
        model = randomised(config(safeguard=safeguard, learn_alpha=False, **CONCAVE[0]), std=1.0)
        idx, _ = tokens(model.cfg)
        rises.append(model.certificate(idx=idx).check.frozen.relative > 1e-9)
    assert any(rises[:3])
    assert not any(rises[3:])


CURVED = (
    {"feedforward": "ff2w"},
    {"feedforward": "ff2w", "activation": "gelu_tanh", "feedforward_scale": True, "bias": True},
    {"feedforward": "ff1"},
    {"feedforward": "memory", "potential": "gelu"},
    {"feedforward": "memory", "mask": "inclusive"},
    {"feedforward": "memory", "mask": "inclusive", "coupling": "full"},
)


def normalised(norm, x):
    """n(x) by itself, with gamma = 1 and delta = 0."""
    x = norm.centred(x)
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


@pytest.mark.parametrize("fields", CURVED, ids=str)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_no_energy_curves_more_than_it_says(kind, fields):
    """The largest eigenvalue of each token's Hessian in n, by autograd, at random points of the
    sphere; and the bound is not far above what the weights allow."""
    model = randomised(config(norm=kind, safeguard="cone", **fields))
    norm = model.energy_block.norm
    bounds = [term.curvature(norm) for term in model.energy_block.terms.values()]
    bound = sum(b.item() for b in bounds if b is not None)
    assert bound > 0
    plan, largest = model.energy_block.plan(), -math.inf
    for _ in range(20):
        n = normalised(norm, torch.randn(1, 5, 9, dtype=torch.float64))
        for A in range(5):

            def energy(own, n=n, A=A):
                changed = torch.cat([n[:, :A], own[None, None], n[:, A + 1 :]], 1)
                delta = 0 if norm.offset is None else norm.offset
                g = norm.gamma * changed + delta
                total = torch.zeros((), dtype=torch.float64)
                for planned in plan.terms:
                    z = planned.readout.z(g)
                    past = WholeText(0, planned.term.keys(z, g))
                    total = total + planned.term.energy(z, past)[0, A]
                return total

            hessian = torch.func.hessian(energy)(n[0, A])
            if kind == "layernorm":  # along the mean nothing moves
                hessian = norm.centred(norm.centred(hessian).mT)
            eigenvalues = torch.linalg.eigvalsh((hessian + hessian.mT).detach() / 2)
            largest = max(largest, eigenvalues[-1].item())
    assert 0 < largest <= bound < 100 * largest


@pytest.mark.parametrize("fields", CURVED, ids=str)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_curved_energies_do_not_rise_either(kind, eps, fields):
    with_eps = {} if kind == "none" else {"norm_eps": eps}
    cfg = config(norm=kind, safeguard="cone", **with_eps, **fields)
    model = randomised(cfg, std=0.3 if kind != "none" else 0.1)
    if kind == "none" and fields["feedforward"] == "ff2w":
        assert not model.certificate()  # a product of two unbounded numbers
        return
    assert model.certificate()
    plan = model.energy_block.plan()
    x = torch.randn(300, 5, 9, dtype=torch.float64)
    seen = plan.observe(x, 0)
    moves = 0
    for scale in (1e-4, 1e-2, 1.0, 1e2, 1e4):
        y = x + scale * torch.randn_like(x)
        moved = plan.cone(x, y, seen.force)
        moves += int(((moved - x).norm(dim=-1) > 0).sum())
        for A in range(5):
            tried = x.clone()
            tried[:, A] = moved[:, A]
            after = sum(plan.energies(tried).values())[:, A]
            before = seen.energy[:, A]
            assert (after <= before + 1e-9 * before.abs().clamp(min=1)).all(), (scale, A)
    assert moves > 0.3 * 5 * 1500, moves


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_margin_makes_the_angle_shrink(kind):
    norm = random_norm(kind)
    x, y, force = (torch.randn(500, 9, dtype=torch.float64) for _ in range(3))
    u = norm.centred(norm.gamma * force)

    def gap(v):
        return 1 - (normalised(norm, v) * u).sum(-1) / (9**0.5 * u.norm(dim=-1))

    for margin in (0.0, 0.05, 0.5):
        moved = Cone(norm, None, margin)(x, y, force)
        assert (gap(moved) <= (1 - margin) * gap(x) + 1e-12).all()
        untouched = gap(y) < (1 - margin) * gap(x) - 1e-9
        assert torch.equal(moved[untouched], y[untouched])
        assert 0.03 < untouched.double().mean() < 0.9


def test_single_precision_does_not_rise():
    """In a settled model, all steps of the forward pass, in float32; and in bfloat16 autocast."""
    cfg = config(
        **SETTLED, **FREE, safeguard="cone", prelude=1, drive=True, steps=12, norm="rmsnorm"
    )
    model = randomised(cfg).float()
    idx = torch.randint(11, (200, 13))
    with torch.no_grad():
        for precision in (nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
            with precision:
                states = list(model.states(idx))
            start = states[0]
            energies = [sum(model.energies(x, start=start).values()) for x in states]
            rises = torch.stack(energies).diff(dim=0)
            tolerance = 1e-6 if isinstance(precision, nullcontext) else 5e-3
            assert (rises <= tolerance * energies[0].abs().clamp(min=1)).all()


def test_each_settled_token_has_its_own_number_of_steps():
    """Stopped early, or thought over again with more steps: nobody else's logits change, bit for
    bit, and its own are those of that number of steps."""
    cfg = config(**SETTLED, **FREE, safeguard="cone", prelude=1, drive=True)
    model, (idx, _) = randomised(cfg), tokens(cfg)
    by_steps = torch.stack([model(idx, steps=t)[0] for t in range(1, 10)])
    own = torch.randint(1, 10, idx.shape)
    with torch.no_grad():
        x = model.last_state(idx, steps=9, exits=own)
        found = model.readout(x)
    expected = by_steps.gather(0, (own - 1)[None, ..., None].expand(1, -1, -1, 11))[0]
    assert torch.equal(found, expected)
    again = own.clone()
    again[0, 3] = 9 if own[0, 3] < 9 else 1
    changed = model.readout(model.last_state(idx, steps=9, exits=again)) != found
    assert changed[0, 3].any()
    changed[0, 3] = False
    assert not changed.any()


def test_adaptive_generation_leaves_the_keys_of_a_settled_past_alone():
    cfg = config(**SETTLED, **FREE, safeguard="cone", prelude=1, steps=6)
    model = randomised(cfg)
    caches = []
    for stop in (Stop("kl", 0.0), Stop("kl", 1e9)):
        with torch.no_grad():
            decoder = AdaptiveDecoder(model, [[3, 1, 4]], stop, None)
            for token in (1, 5, 9, 2):
                decoder.next_logits()
                decoder.feed(torch.tensor([token]))
        caches.append(decoder.cache.kept)
        assert decoder.taken == [6 if stop.tolerance == 0 else 1]
    assert caches[0].keys() == caches[1].keys()
    for place, kept in caches[0].items():
        assert all(torch.equal(a, b) for a, b in zip(kept, caches[1][place], strict=True))
