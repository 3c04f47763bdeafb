"""Hand-derived forces against autograd, in every combination of parts."""

import itertools

import pytest
import torch

import nrgpt
from nrgpt import LanguageModel
from nrgpt.model.energy.attention import AttentionEnergy
from nrgpt.model.energy.feedforward import FF1, FF2W

from .. import reference
from ..models import COUPLINGS, FEEDFORWARDS, MASKS, NORMS, RATES, config, randomised, relative
from ..models import tokens as make_tokens
from ..models import weights as make_weights

FF_IDS = ["-".join(map(str, f.values())) for f in FEEDFORWARDS]


@pytest.mark.parametrize("feedforward", FEEDFORWARDS, ids=FF_IDS)
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", [False, True], ids=["plain", "options"])
def test_energies_and_forces_of_each_term(mask, coupling, feedforward, options):
    """energies() are the paper's; forces() are minus their gradients, term by term."""
    cfg = config(
        mask=mask,
        coupling=coupling,
        learn_alpha=options,
        bias=options,
        feedforward_scale=options,
        **feedforward,
    )
    model = randomised(cfg)
    w = make_weights(model)
    g = torch.randn(3, 7, cfg.width, dtype=torch.float64)
    total = model.energy_block.energy
    energies, forces = total.energies(g), total.forces(g)
    expected = {
        "attention": lambda own: reference.attention_energy(cfg, w, own, g),
        "feedforward": lambda own: reference.feedforward_energy(cfg, w, own),
    }
    assert energies.keys() == forces.keys() == expected.keys()
    for name, energy in expected.items():
        own = g.clone().requires_grad_()
        E = energy(own)
        assert energies[name].shape == (3, 7)
        assert relative(energies[name], E) < 1e-10
        assert relative(forces[name], -torch.autograd.grad(E.sum(), own)[0]) < 1e-10


@pytest.mark.parametrize("feedforward", FEEDFORWARDS, ids=FF_IDS)
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("mask", MASKS)
def test_update_and_loss_gradients(mask, coupling, feedforward):
    """For every norm and rate: the step is -eta dE/dg, and every parameter's gradient of the loss
    is that of the plain implementation, with autograd inside the forward pass."""
    for norm, rate in itertools.product(NORMS, RATES):
        cfg = config(
            mask=mask,
            coupling=coupling,
            norm=norm,
            rate=rate,
            bias=True,
            feedforward_scale=True,
            tied=False,
            head_bias=True,
            steps=2,
            **feedforward,
        )
        # Without a norm, nothing keeps x small: smaller weights keep exp() in range.
        model = randomised(cfg, std=0.1 if norm == "none" else 0.3)
        w = make_weights(model)
        x = torch.randn(2, 7, cfg.width, dtype=torch.float64)
        for t in (0, 1, 2):  # 2: one step more than there are rates
            step = model.blocks[0](x, t, model.energy_block.plan())
            assert relative(step, reference.nrgpt_step(cfg, w, x, t)) < 1e-10, (norm, rate, t)

        idx, targets = make_tokens(cfg)
        _, loss = model(idx, targets)
        loss.backward()
        reference.loss(cfg, w, idx, targets).backward()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            expected = w[name].grad
            assert expected is not None, name
            scale = max(expected.norm().item(), 1e-6)
            assert (parameter.grad - expected).norm() < 1e-10 * scale, (norm, rate, name)


def test_released_mask_is_no_gradient_of_its_energy():
    """With the diagonal kept, the update is off by far more than rounding."""
    model = randomised(config(mask="released"))
    g = torch.randn(2, 7, 9, dtype=torch.float64, requires_grad=True)
    total = model.energy_block.energy
    w = make_weights(model)
    exact = -torch.autograd.grad(
        reference.attention_energy(config(mask="inclusive"), w, g, g.detach()).sum(), g
    )[0]
    assert relative(total.forces(g)["attention"], exact) > 0.05


class Quadratic(nrgpt.EnergyTerm):
    """A user's term in five lines: its force is left to autograd."""

    def energy(self, z, keys):
        return 0.05 * z.square().sum(-1)


class QuadraticByHand(Quadratic):
    def force(self, z, keys):
        return -0.1 * z


@pytest.mark.parametrize("rate", RATES)
def test_extra_terms_at_call_time(rate):
    model = randomised(config(rate=rate))
    idx, _ = make_tokens(model.cfg)
    plain, _ = model(idx)
    by_autograd, _ = model(idx, extra={"quadratic": Quadratic()})
    by_hand, _ = model(idx, extra={"quadratic": QuadraticByHand()})
    assert relative(by_autograd, by_hand) < 1e-12
    assert relative(by_autograd, plain) > 1e-4
    x = torch.randn(2, 7, 9, dtype=torch.float64)
    g = model.energy_block.norm(x)
    assert model.energies(x, extra={"q": Quadratic()}).keys() == {"attention", "feedforward", "q"}
    step = model.energy_block.update(x, 1, model.energy_block.prepare({"q": Quadratic()}))
    without = model.energy_block.update(x, 1, model.energy_block.plan())
    eta = reference.eta(model.cfg, make_weights(model), 1, x, "q")
    assert relative(step - without, torch.einsum("bnij,bnj->bni", eta, -0.1 * g)) < 1e-10
    with pytest.raises(ValueError, match="already has a term"):
        model(idx, extra={"attention": Quadratic()})


def test_extra_term_trains_through_autograd_and_says_so():
    model = randomised(config())
    idx, targets = make_tokens(model.cfg)
    gradients = []
    for term in (Quadratic(), QuadraticByHand()):
        model.zero_grad()
        model(idx, targets, extra={"q": term})[1].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert relative(*gradients) < 1e-12
    assert "autograd" in repr(Quadratic())
    assert "autograd" not in repr(QuadraticByHand())


class Mixing(nrgpt.EnergyTerm):
    """A user's term that looks at other tokens, force left to autograd: the mean of the past."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("R", torch.randn(4, width, dtype=torch.float64))

    def readout(self):
        return nrgpt.Readout(
            self.R, torch.ones(4, dtype=torch.float64), torch.ones(self.R.shape[1]).double()
        )

    def keys(self, z, g):
        return z

    def energy(self, z, keys):
        before = keys.cumsum(1) - keys
        return (z * before).sum(-1) + z.pow(4).sum(-1)


def test_a_mixing_term_by_autograd():
    """Each token's force is the gradient of its own energy, the tokens before it held fixed."""
    model = randomised(config())
    term = Mixing(9)
    g = torch.randn(2, 7, 9, dtype=torch.float64)
    force = model.energy_block.energy.forces(g, {"mixing": term})["mixing"]
    for A in range(7):
        own = g[:, A].clone().requires_grad_()
        moved = torch.cat([g[:, :A], own[:, None], g[:, A + 1 :]], 1)
        E_A = model.energy_block.energy.energies(moved, {"mixing": term})["mixing"][:, A]
        assert relative(force[:, A], -torch.autograd.grad(E_A.sum(), own)[0]) < 1e-12


def test_terms_that_break_the_contract_are_named():
    model = randomised(config())
    idx, _ = make_tokens(model.cfg)
    x = torch.randn(2, 7, 9, dtype=torch.float64)

    class WrongShape(Quadratic):
        def energy(self, z, keys):
            return z

    class HalfWritten(Quadratic):
        written = 3

    class BiasAlone(Quadratic):
        def readout(self):
            return nrgpt.Readout(bias=torch.ones(9))

    with pytest.raises(ValueError, match=r"term 'q': energy has shape \(2, 7, 9\)"):
        model.energies(x, extra={"q": WrongShape()})
    with pytest.raises(ValueError, match=r"written = 3 but no force"):
        model(idx, extra={"q": HalfWritten()})
    with pytest.raises(ValueError, match=r"bias needs a weight"):
        model(idx, extra={"q": BiasAlone()})
    with pytest.raises(ValueError, match=r"must be an EnergyTerm"):
        model(idx, extra={"q": lambda z: z})


def test_energies_keep_their_precision_under_autocast():
    model = LanguageModel(config(width=24))
    x = torch.randn(2, 7, 24)
    exact = model.energies(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(E, exact[name]) for name, E in model.energies(x).items())


class Mine(nrgpt.EnergyTerm):
    """A trainable term of a user's own, with a readout and without a hand-written force."""

    def __init__(self, cfg):
        super().__init__()
        self.xi = torch.nn.Parameter(torch.empty(5, cfg.width))

    def readout(self):
        return nrgpt.Readout(self.xi)

    def energy(self, z, keys):
        return -torch.logsumexp(z, -1)


def test_a_registered_term_trains(monkeypatch):
    monkeypatch.setitem(nrgpt.model.energy.FEEDFORWARD, "mine", Mine)
    with pytest.raises(ValueError, match=r"feedforward\.xi.*nrgpt\.init\.RULES"):
        LanguageModel(config(feedforward="mine"))
    monkeypatch.setitem(nrgpt.model.init.RULES, "xi", nrgpt.model.init.normal)
    model = randomised(config(feedforward="mine"))
    idx, targets = make_tokens(model.cfg)
    model(idx, targets)[1].backward()
    assert model.energy_block.energy.terms["feedforward"].xi.grad.abs().sum() > 0


class NormalisedKeys(AttentionEnergy):
    def keys(self, z, g):
        keys = super().keys(z, g)
        return keys / keys.norm(dim=-1, keepdim=True)


class TurnedHeads(AttentionEnergy):
    def split(self, z):
        return super().split(z.flip(-1))


class Gained(FF1):
    def gain(self):
        return torch.full((len(self.W),), 3.0, dtype=self.W.dtype)

    def bare_force(self, z, keys):
        return self.force(z, keys) / 3


class Halved(FF2W):
    def force(self, z, keys):
        return super().force(z, keys) / 2


@pytest.mark.parametrize("kind", [NormalisedKeys, TurnedHeads, Gained, Halved])
def test_a_subclass_keeps_what_it_changed(kind):
    """Terms may make their update in one go; one that changes a part of it must not lose that."""
    cfg = config()
    term = kind(cfg).double()
    for parameter in term.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    g = torch.randn(2, 7, cfg.width, dtype=torch.float64)
    readout = term.readout()
    rows = term.written or len(readout.weight)
    write = torch.randn(cfg.width, rows, dtype=torch.float64)
    expected = nrgpt.EnergyTerm.update(term, g, readout, write, None)
    assert relative(term.update(g, readout, write, None), expected) < 1e-12
    z = g @ readout.weight.T
    left = torch.randn(2, 7, 3, dtype=torch.float64)
    beside = term.bare_force_beside(left, z, term.keys(z, g))
    assert torch.equal(beside[..., :3], left)
    assert relative(beside[..., 3:], term.bare_force(z, term.keys(z, g))) < 1e-12
