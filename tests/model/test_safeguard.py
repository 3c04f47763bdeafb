"""The cone against a second implementation, and against energies."""

import itertools

import pytest
import torch

from nrgpt import Guarantee, LanguageModel
from nrgpt.model.norm import make_norm
from nrgpt.model.safeguard import Cone
from tests.models import NORMS, RATES, config, randomised, relative, tokens

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
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_edges_are_finite(kind, eps):
    norm = random_norm(kind, eps)
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
        found = Cone(norm)(*leaves)
        assert torch.isfinite(found).all(), name
        gain = ((norm(found) - norm(start)) * force).sum(-1)
        is_defined = gain.isfinite()  # without eps, the norm of zero is not
        assert is_defined.all() or eps == 0
        assert (gain[is_defined] >= -1e-9).all(), name
        if name == "no force":
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
