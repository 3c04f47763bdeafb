"""Hand-derived forces against autograd, in every combination of parts."""

import itertools

import pytest
import torch

import nrgpt
from nrgpt import LanguageModel
from nrgpt.decode.cache import Cache
from nrgpt.model.energy import ENERGIES
from nrgpt.model.energy.attention import AttentionEnergy
from nrgpt.model.energy.feedforward import FF1, FF2W
from nrgpt.model.init import initialise
from nrgpt.model.past import WholeText

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
        norm="none",  # g is x
        **feedforward,
    )
    model = randomised(cfg)
    w = make_weights(model)
    g = torch.randn(3, 7, cfg.width, dtype=torch.float64)
    look = model.energy_block.plan().observe(g, 0)
    energies, forces = look.energies, look.forces
    for name, energy in model.energies(g).items():
        assert relative(energy, energies[name]) < 1e-12
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
    model = randomised(config(mask="released", norm="none"))
    g = torch.randn(2, 7, 9, dtype=torch.float64, requires_grad=True)
    w = make_weights(model)
    exact = -torch.autograd.grad(
        reference.attention_energy(config(mask="inclusive"), w, g, g.detach()).sum(), g
    )[0]
    assert relative(model.energy_block.plan().observe(g, 0).forces["attention"], exact) > 0.05


class Quadratic(nrgpt.EnergyTerm):
    """A user's term in five lines: its force is left to autograd."""

    def energy(self, z, past):
        return 0.05 * z.square().sum(-1)


class QuadraticByHand(Quadratic):
    def force(self, z, past):
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
    step = model.energy_block.plan({"q": Quadratic()}).move(x, 1)
    without = model.energy_block.plan().move(x, 1)
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
        field = torch.ones(self.R.shape[1]).double()
        return nrgpt.Readout(self.R, torch.ones(4, dtype=torch.float64), field=field)

    def keys(self, z, g):
        return z.unsqueeze(1)

    def energy(self, z, past):
        keys, mask = past.visible(strict=True)
        before = (mask.to(z.dtype) @ keys)[:, 0]
        return (z * before).sum(-1) + z.pow(4).sum(-1)


def test_a_mixing_term_by_autograd():
    """Each token's force is the gradient of its own energy, the tokens before it held fixed."""
    model = randomised(config(norm="none"))
    plan = model.energy_block.plan({"mixing": Mixing(9)})
    g = torch.randn(2, 7, 9, dtype=torch.float64)
    force = plan.observe(g, 0).forces["mixing"]
    for A in range(7):
        own = g[:, A].clone().requires_grad_()
        moved = torch.cat([g[:, :A], own[:, None], g[:, A + 1 :]], 1)
        E_A = plan.energies(moved)["mixing"][:, A]
        assert relative(force[:, A], -torch.autograd.grad(E_A.sum(), own)[0]) < 1e-12


@pytest.mark.parametrize("stacked", [False, True])
def test_a_mixing_term_decodes_with_the_cache_by_itself(stacked):
    model = randomised(config())
    extra = {"mixing": Mixing(9)}
    idx, _ = make_tokens(model.cfg)
    whole = model.last_state(idx, extra=extra)
    cache, plans, states = Cache(13), model.plan(extra, stacked=stacked), []
    for part in idx.split([3, 1, 2, 1], dim=1):
        positions = cache.begin(len(part), part.shape[1], part.device)
        states.append(model.extend(part, positions, plans, cache))
        cache.end(part.shape[1])
    assert relative(torch.cat(states, dim=1), whole) < 1e-12
    prompts = idx.tolist()
    new = model.generate(prompts, max_new_tokens=4, extra=extra)
    assert new == model.generate(prompts, max_new_tokens=4, extra=extra, cache="none")


def test_terms_that_break_the_contract_are_named():
    model = randomised(config())
    idx, _ = make_tokens(model.cfg)
    x = torch.randn(2, 7, 9, dtype=torch.float64)

    class WrongShape(Quadratic):
        def energy(self, z, past):
            return z

    class BiasAlone(Quadratic):
        def readout(self):
            return nrgpt.Readout(bias=torch.ones(9))

    with pytest.raises(ValueError, match=r"term 'q': energy has shape \(2, 7, 9\)"):
        model.energies(x, extra={"q": WrongShape()})
    with pytest.raises(ValueError, match=r"bias needs a read"):
        model(idx, extra={"q": BiasAlone()})
    with pytest.raises(ValueError, match=r"must be an EnergyTerm"):
        model(idx, extra={"q": lambda z: z})


def test_energies_keep_their_precision_under_autocast():
    model = LanguageModel(config(width=24))
    x = torch.randn(2, 7, 24)
    exact = model.energies(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(E, exact[name]) for name, E in model.energies(x).items())
    settled = LanguageModel(config(width=24, past="settled"))
    exact = settled.energies(x, start=x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = settled.energies(x.bfloat16().float(), start=x)
        assert all(E.dtype == torch.float32 for E in found.values())
        assert all(torch.equal(E, exact[name]) for name, E in settled.energies(x, start=x).items())


def test_an_energy_over_an_inherited_force_is_refused():
    """Or the class would silently keep the force of another energy."""
    with pytest.raises(TypeError, match=r"Doubled .* `force = EnergyTerm\.force`"):

        class Doubled(FF1):
            def energy(self, z, past):
                return 2 * super().energy(z, past)

    class ByAutograd(FF1):
        force = nrgpt.EnergyTerm.force

        def energy(self, z, past):
            return 2 * super().energy(z, past)

    cfg = config(norm="none", feedforward="ff1")
    plain, doubled = FF1(cfg), ByAutograd(cfg)
    doubled.load_state_dict({"W": torch.randn(18, 9)})
    plain.load_state_dict(doubled.state_dict())
    z = torch.randn(2, 5, 18)
    E, force = doubled.energy_and_force(z, None)
    assert relative(E, 2 * plain.energy(z, None)) < 1e-6
    assert relative(force, 2 * plain.force(z, None)) < 1e-6


class Mine(nrgpt.EnergyTerm):
    """A trainable term of a user's own, with a readout and without a hand-written force."""

    def __init__(self, cfg):
        super().__init__()
        self.xi = nrgpt.parameter(5, cfg.width, start=nrgpt.normal, muon="matrix")

    def readout(self):
        return nrgpt.Readout(self.xi)

    def energy(self, z, past):
        return -torch.logsumexp(z, -1)


def test_registered_terms_train(monkeypatch):
    """In the place of the feed-forward energy, and as a third term."""
    monkeypatch.delitem(ENERGIES, "mine", raising=False)
    nrgpt.register("mine", Mine)
    nrgpt.register("mine", Mine)  # the module may be imported again
    for fields in ({"feedforward": "mine"}, {"terms": ("attention", "feedforward", "mine")}):
        for rate in RATES:
            model = randomised(config(rate=rate, **fields))
            name = (fields.get("feedforward") and "feedforward") or "mine"
            assert model.for_muon[f"blocks.0.energy.terms.{name}.xi"] == "matrix"
            idx, targets = make_tokens(model.cfg)
            model(idx, targets)[1].backward()
            assert model.energy_block.terms[name].xi.grad.abs().sum() > 0
            new = model.generate(idx.tolist(), max_new_tokens=4)
            assert new == model.generate(idx.tolist(), max_new_tokens=4, cache="none")
    other = type("FF1", (Mine,), {})
    for energy in (Mine, other):  # the name of the class alone says nothing
        with pytest.raises(ValueError, match="another energy has it"):
            nrgpt.register("ff1", energy)
    for name in ("no name", "feedforward", "total", "keys", "forward"):
        with pytest.raises(ValueError, match="must be a Python identifier"):
            nrgpt.register(name, Mine)


def test_parameters_of_other_origin_keep_their_values():
    class Careless(Mine):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.xi = torch.nn.Parameter(torch.full((5, cfg.width), float("nan")))

    class Given(Mine):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.xi = torch.nn.Parameter(torch.full((5, cfg.width), 0.25))

    cfg = config()
    model = LanguageModel(cfg)
    model.energy_block.energy.terms["given"] = Given(cfg)
    initialise(model, cfg)
    assert (model.energy_block.terms["given"].xi == 0.25).all()
    model.energy_block.energy.terms["careless"] = Careless(cfg)
    with pytest.raises(ValueError, match=r"careless\.xi.*not finite"):
        initialise(model, cfg)


class NormalisedKeys(AttentionEnergy):
    def keys(self, z, g):
        keys = super().keys(z, g)
        return keys / keys.norm(dim=-1, keepdim=True)


class TurnedHeads(AttentionEnergy):
    def split(self, z):
        return super().split(z.flip(-1))


class Tripled(FF1):
    def force(self, z, past):
        return 3 * super().force(z, past)


class Halved(FF2W):
    def readout(self):
        read, bias, _, field, *_ = super().readout()
        return nrgpt.Readout(read, bias, read / 2, field)


@pytest.mark.parametrize("kind", [NormalisedKeys, TurnedHeads, Tripled, Halved])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_subclass_keeps_what_it_changed(kind, stacked):
    """Kernels know the exact types only; a subclass goes by its own methods."""
    cfg = config(norm="none")
    model = randomised(cfg)
    term = kind(cfg).double()
    with torch.no_grad():
        for parameter in term.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    plan = model.energy_block.plan({"changed": term}, stacked=stacked)
    x = torch.randn(2, 7, cfg.width, dtype=torch.float64)
    readout = term.readout()
    z = readout.z(x)
    force = readout.on_g(term.force(z, WholeText(0, term.keys(z, x))))
    cache = Cache(13)
    cache.begin(2, 7, x.device)
    eta = reference.eta(cfg, make_weights(model), 0, x, "changed")
    expected = torch.einsum("bnij,bnj->bni", eta, force)
    without = model.energy_block.plan().move(x, 0)
    assert relative(plan.move(x, 0) - without, expected) < 1e-10
    assert relative(plan.move(x, 0, cache) - without, expected) < 1e-10


class Matched(nrgpt.EnergyTerm):
    """A user's term that asks its past for attention; autograd finds the force."""

    def __init__(self, cfg):
        super().__init__()
        self.W = nrgpt.parameter(4, cfg.width, start=nrgpt.normal)

    def readout(self):
        return nrgpt.Readout(self.W)

    def keys(self, z, g):
        return z.unsqueeze(1)

    def energy(self, z, past):
        q = z.unsqueeze(1)
        return -(q * past.attend(q, 0.5, strict=True)).sum((1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_inside_an_energy_trains_by_autograd(monkeypatch, dtype):
    """Which takes attention's second derivative."""
    monkeypatch.setitem(ENERGIES, "matched", Matched)
    torch.manual_seed(0)
    model = randomised(config(terms=("attention", "feedforward", "matched"))).to(dtype)
    idx, targets = make_tokens(model.cfg)
    weight = model.energy_block.terms["matched"].W
    _, loss = model(idx, targets)
    loss.backward()
    step, direction = (1e-3 if dtype == torch.float32 else 1e-6), torch.randn_like(weight)
    losses = []
    with torch.no_grad():
        for sign in (1, -1):
            weight.add_(sign * step * direction)
            losses.append(model(idx, targets)[1])
            weight.sub_(sign * step * direction)
    slope = (losses[0] - losses[1]) / (2 * step)
    tolerance = 2e-2 if dtype == torch.float32 else 1e-6
    assert (weight.grad * direction).sum().item() == pytest.approx(slope.item(), rel=tolerance)
