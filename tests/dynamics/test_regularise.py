"""Terms that are added at inference."""

import pytest
import torch

from nrgpt.decode.generate import generate
from nrgpt.dynamics.field import Field
from nrgpt.dynamics.regularise import Bounded, Says, Toward, concept_vector
from nrgpt.dynamics.relax import relax
from nrgpt.dynamics.schedules import cosine, linear, switch_on
from nrgpt.dynamics.trajectory import trajectory
from nrgpt.model.past import WholeText
from tests.decode.test_generate import PROMPTS, talkative
from tests.models import COUPLINGS, NORMS, config, randomised, relative
from tests.models import forces as forces_of


def forces_are_gradients(model, term):
    """The added term's force on g, against autograd token by token, with a frozen past."""
    idx = torch.randint(11, (2, 7))
    *_, x = model.states(idx)
    g = model.energy_block.norm(x).detach()
    readout = term.readout()
    keys = term.keys(readout.z(g), g)
    past = WholeText(0, None if keys is None else keys.detach())

    def energy(g):
        return term.energy(readout.z(g), past).sum()

    exact = -torch.func.grad(energy)(g)
    found = readout.on_g(term.force(readout.z(g), past))
    assert exact.abs().max() > 1e-3
    assert relative(found, exact) < 1e-10


def test_toward():
    model = randomised(config())
    v = torch.randn(9, dtype=torch.float64)
    forces_are_gradients(model, Toward(v, 0.7))
    certified = randomised(config(feedforward="memory", rate="gamma", learn_alpha=False))
    assert certified.certificate({"pull": Toward(v, 0.7)})
    idx = torch.randint(11, (2, 7))
    ends = []
    for weight in (-3.0, 0.0, 3.0):
        *_, x = model.states(idx, extra={"pull": Toward(v, weight)})
        ends.append((model.energy_block.norm(x) @ v).mean().item())
    assert ends == sorted(ends)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fields", [{}, {"tied": False, "head_bias": True}], ids=str)
def test_says(norm, fields):
    exactly = {} if norm == "none" else {"norm_eps": 0.0}
    model = randomised(config(norm=norm, **exactly, **fields))
    term = Says(model, [2, 5], 1.3)
    forces_are_gradients(model, term)
    *_, x = model.states(torch.randint(11, (2, 7)))
    logits = term.logits(model.energy_block.norm(x))
    offset = (logits - model.readout(x)).mean(-1, keepdim=True)
    assert relative(logits - offset, model.readout(x)) < 1e-10  # equal but for what cancels out
    p = model.readout(x).softmax(-1)[..., [2, 5]].sum(-1)
    energy = term.energy(model.energy_block.norm(x), None)
    assert relative(energy, -1.3 * p.log()) < 1e-9


def test_says_changes_what_is_said():
    model = talkative()
    free = generate(model, PROMPTS, max_new_tokens=19)
    often = torch.tensor([t for row in free for t in row]).bincount(minlength=11).argmax().item()
    shares = []
    for weight in (-3.0, 0.0, 3.0):
        extra = {"says": Says(model, [often], weight)}
        said = generate(model, PROMPTS, max_new_tokens=19, extra=extra)
        shares.append(sum(row.count(often) for row in said))
    assert shares[0] < shares[1] <= shares[2]


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_bounded(coupling):
    model = randomised(config(coupling=coupling))
    for name, bound in (("attention", -50.0), ("feedforward", -50.0)):
        term = Bounded(model.energy_block.energy.terms[name], bound, 0.01)
        forces_are_gradients(model, term)
    term = Bounded(model.energy_block.energy.terms["attention"], -20.0, 0.01)
    idx = torch.randint(11, (2, 7))
    extra = {"bounded": term}
    *_, x = model.states(idx, extra=extra)
    look = Field(model, model.begin(idx), extra=extra, past=x).look(x, 0)
    assert relative(look.energy, sum(model.energies(x, extra).values())) < 1e-12
    assert generate(model, PROMPTS, max_new_tokens=5, extra=extra) == generate(
        model, PROMPTS, max_new_tokens=5, extra=extra, cache="none"
    )


def test_a_concept_vector_tells_two_sets_apart():
    model = randomised(config())
    having, lacking = torch.randint(0, 5, (20, 7)), torch.randint(6, 11, (20, 7))
    v = concept_vector(model, having, lacking)
    *_, a = model.states(having)
    *_, b = model.states(lacking)
    norm = model.energy_block.norm
    assert (norm(a) @ v).mean() > (norm(b) @ v).mean()


def test_mistakes():
    model = randomised(config())
    for wrong, said in (
        (lambda: Toward(torch.zeros(9), 1.0), "direction"),
        (lambda: Says(model, [], 1.0), "tokens"),
        (lambda: Says(model, [11], 1.0), "token 11"),
        (lambda: Bounded(Toward(torch.ones(9), 1.0), 0.0, -1.0), "weight = -1.0"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()


# Weights that change over the steps


def by_hand(model, idx, v, weight, steps):
    """x <- x - eta dE/dg with E = the model's - weight(t) g . v / |v|: all states."""
    block = model.energy_block
    eye, names = torch.eye(9, dtype=torch.float64), ("attention", "feedforward", "pull")
    etas = {name: block.rate.fold(eye, block.norm, name) for name in names}
    x = model.embed(idx)
    states = [x]
    for t in range(steps):
        forces = forces_of(model, x) | {"pull": weight(t) * v / v.norm()}
        push = sum(force @ etas[name].T for name, force in forces.items())
        x = x + block.rate.apply_step(push, t, x, block.norm)
        states.append(x)
    return torch.stack(states).detach()


@pytest.mark.parametrize("rate", ["gamma", "free_per_step", "free_per_term"])
def test_a_weight_may_follow_the_steps(rate):
    model = randomised(config(rate=rate))
    idx, v, steps = torch.randint(11, (2, 7)), torch.randn(9, dtype=torch.float64), 5
    for weight in (linear(0, 9, 4), cosine(5, -2, 3), switch_on(2, 4.0)):
        states = by_hand(model, idx, v, weight, steps)
        extra = {"pull": Toward(v, weight)}
        assert relative(relax(model, idx, steps=steps, extra=extra).x, states[-1]) < 1e-12
        assert relative(relax(model, idx, steps=steps).x, states[-1]) > 1e-3
        seen = trajectory(model, idx, steps=steps, extra=extra)
        assert relative(seen.size, states.norm(dim=-1)) < 1e-12
        g = model.energy_block.norm(states)
        weights = torch.tensor([float(weight(t)) for t in range(steps + 1)])
        pulled = -weights[:, None, None] * (g @ v) / v.norm()
        assert relative(seen.energies["pull"], pulled) < 1e-12
        own = torch.stack(list(model.states(idx, steps=steps, extra=extra)))
        assert relative(own, states) < 1e-12


def test_generation_follows_a_weight_too():
    model = talkative()
    extra = {"says": Says(model, [3], linear(-2, 6, model.cfg.steps))}
    said = generate(model, PROMPTS, max_new_tokens=9, extra=extra)
    assert said == generate(model, PROMPTS, max_new_tokens=9, extra=extra, cache="none")
    assert said != generate(model, PROMPTS, max_new_tokens=9)


def test_an_untold_step_is_an_error():
    model = randomised(config())
    extra = {"pull": Toward(torch.ones(9, dtype=torch.float64), switch_on(1))}
    idx = torch.randint(11, (2, 7))
    with pytest.raises(ValueError, match="depends on the inference step"):
        model.energies(model.embed(idx), extra)


def test_a_changing_energy_is_not_certified():
    model = randomised(config(feedforward="memory", rate="gamma", learn_alpha=False))
    v = torch.ones(9, dtype=torch.float64)
    assert model.certificate({"pull": Toward(v, 0.7)})
    blamed = model.certificate({"pull": Toward(v, linear(0, 1, 3))}).blame
    assert [finding.part for finding in blamed] == ["Toward"]


def test_schedules_inside_a_bound():
    model = randomised(config())
    inner = Says(model, [2], linear(3, 1, 3))
    idx = torch.randint(11, (2, 7))
    extra = {"bounded": Bounded(inner, 0.5, switch_on(1, 0.5))}
    seen = trajectory(model, idx, extra=extra)
    x = relax(model, idx, extra=extra).x
    above = torch.relu(inner.energy(model.energy_block.norm(x), WholeText(3, None)) - 0.5)
    assert above.max() > 1e-2
    assert relative(seen.energies["bounded"][-1], 0.25 * above.square()) < 1e-12
    with pytest.raises(ValueError, match=r"weight\(1\) = -1"):
        relax(model, idx, extra={"bounded": Bounded(inner, 0.5, lambda t: -t)})
