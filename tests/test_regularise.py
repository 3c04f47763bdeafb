"""Terms that are added at inference."""

import pytest
import torch

from nrgpt.dynamics.field import Field
from nrgpt.dynamics.regularise import Bounded, Says, Toward, concept_vector
from nrgpt.generate import generate
from tests.models import COUPLINGS, NORMS, config, randomised, relative
from tests.test_generate import PROMPTS, talkative


def forces_are_gradients(model, term):
    """The added term's force on g, against autograd token by token, with a frozen past."""
    idx = torch.randint(11, (2, 7))
    *_, x = model.states(idx)
    g = model.energy_block.norm(x).detach()
    readout = term.readout()
    R = torch.eye(9, dtype=g.dtype) if readout.weight is None else readout.weight
    keys = term.keys(g @ R.T if readout.weight is not None else g, g)
    keys = None if keys is None else keys.detach()

    def energy(g):
        return term.energy(g @ R.T if readout.weight is not None else g, keys).sum()

    exact = -torch.func.grad(energy)(g)
    z = g @ R.T if readout.weight is not None else g
    found = term.force(z, keys) @ R[: term.written]
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
    model = randomised(config(norm=norm, norm_eps=0.0, **fields))
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
    look = Field(model, 2, 7, extra=extra, past=x).look(x)
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
