"""When tokens come to rest and whether they come back: on landscapes whose answer is known."""

import itertools
import math

import pytest
import torch

from nrgpt import EnergyTerm
from nrgpt.dynamics.convergence import Stability, Transients, stability, transients
from nrgpt.dynamics.field import Field
from nrgpt.dynamics.plots import convergence_figure, doubling
from nrgpt.dynamics.regularise import Toward
from tests.models import config, randomised, relative


class Bowl(EnergyTerm):
    """E = k/2 |g - a|^2, with a k for each token: a plain step takes g to (1 - k) g + k a."""

    def __init__(self, k):
        super().__init__()
        self.k = k
        self.a = torch.arange(9, dtype=torch.float64)

    def energy(self, z, keys):
        return self.k / 2 * (z - self.a).square().sum(-1)

    def force(self, z, keys):
        return -self.k[:, None] * (z - self.a)


def bowl(*k):
    """A model without a norm whose energies are all zero, and the bowl to add."""
    model = randomised(config(norm="none", rate="identity"))
    with torch.no_grad():
        for parameter in model.energy_block.parameters():
            parameter.zero_()
    return model, {"bowl": Bowl(torch.tensor(k, dtype=torch.float64))}


K = (0.5, 0.1, 0.02, 1.5, 2.05)


def test_transients_of_a_linear_contraction():
    model, extra = bowl(*K)
    idx = torch.randint(11, (3, 5))
    found = transients(model, idx, steps=60, tolerance=1e-2, extra=extra)
    assert found.steps == 60
    offset = model.embed(idx).detach() - extra["bowl"].a
    for A, k in enumerate(K):
        for row in range(3):
            g = [(1 - k) ** t * offset[row, A] + extra["bowl"].a for t in range(61)]
            moves = [float((b - a).norm() / a.norm()) for a, b in itertools.pairwise(g)]
            assert relative(found.moves[:, row, A], torch.tensor(moves).double()) < 1e-6
            moving = [t for t, move in enumerate(moves, 1) if move > 1e-2]
            length = found.lengths[row, A]
            if moving and moving[-1] == 60:
                assert length.isnan()
            else:
                assert length == (moving[-1] if moving else 0)
    assert found.lengths[:, 4].isnan().all()  # 2.05 overshoots further at each step
    assert found.share_at_rest.tolist() == [1, 1, 1, 1, 0]
    assert found.by_position()[4].isnan()
    assert torch.equal(found.by_position()[:4], found.lengths[:, :4].median(0).values)


@pytest.mark.parametrize("frozen", [False, True])
def test_factors_of_a_linear_contraction(frozen):
    model, extra = bowl(*K)
    idx = torch.randint(11, (3, 5))
    past = model.embed(idx).detach() if frozen else None
    found = stability(model, idx, settle=40, steps=30, past=past, extra=extra)
    assert relative(found.factors, torch.tensor(K).double().sub(1).abs().expand(3, 5)) < 1e-6
    assert (found.left[:, [0, 1, 3]] < 0.5).all()
    assert (found.left[:, 4] > 1).all()
    assert found.share_back == pytest.approx(3 / 5)


def test_rounding_does_not_spoil_factors():
    distances = torch.tensor([1.0, 0.1, 0.01, 1e-12, 3e-12, 1e-12])[:, None, None]
    assert Stability(distances, 1e-9, 5).factors.item() == pytest.approx(0.1)
    growing = torch.tensor([1.0, 2.0, 4.0])[:, None, None]
    assert Stability(growing, 1e-9, 5).factors.item() == pytest.approx(2.0)


def test_under_a_norm_a_push_fades_as_x_grows():
    """Under a constant pull x = x0 + t v: x never loses the push, but g forgets it."""
    model = randomised(config(norm="rmsnorm", rate="identity"))
    with torch.no_grad():
        for parameter in model.energy_block.energy.parameters():
            parameter.zero_()
        model.energy_block.norm.gamma.fill_(1.0)
    pull = {"pull": Toward(torch.randn(9, dtype=torch.float64), 1.0)}
    found = stability(model, torch.randint(11, (3, 5)), settle=600, steps=600, extra=pull)
    assert torch.allclose(found.left, torch.full((3, 5), 0.5).double(), atol=0.04)
    assert torch.allclose(found.powers, torch.ones(3, 5).double(), atol=0.12)


def test_a_move_that_is_not_a_number_is_no_rest():
    moves = torch.tensor([[[0.5, 0.5]], [[0.0, math.nan]], [[0.0, 0.0]], [[0.0, math.nan]]])
    found = Transients(1e-3, 2, moves, torch.zeros(1, 2, 9))
    assert found.lengths[0, 0] == 1
    assert found.lengths[0, 1].isnan()


def test_moves_are_those_of_the_models_states():
    model = randomised(config(rate="gamma_per_step"))
    idx = torch.randint(11, (2, 7))
    g = torch.stack([model.energy_block.norm(x) for x in model.states(idx, steps=8)]).detach()
    found = transients(model, idx, steps=8)
    expected = (g[1:] - g[:-1]).norm(dim=-1) / g[:-1].norm(dim=-1)
    assert relative(found.moves, expected) < 1e-12
    assert relative(model.energy_block.norm(found.x), g[-1]) < 1e-12


def test_pushed_tokens_of_a_model_against_two_runs():
    model = randomised(config(rate="gamma_per_step"), std=0.1)
    idx = torch.randint(11, (2, 7))
    *_, past = model.states(idx)
    options = {"settle": 5, "steps": 4, "size": 0.1}
    for held in (None, past.detach()):
        generator = torch.Generator().manual_seed(0)
        found = stability(model, idx, **options, past=held, generator=generator)
        field = Field(model, model.begin(idx), past=held)
        *_, (x, _) = field.roll(model.embed(idx), 6)
        unit = model.energy_block.norm(x).norm(dim=-1)
        noise = torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(0))
        pushed = x + 0.1 * x.norm(dim=-1, keepdim=True) * noise / noise.norm(dim=-1, keepdim=True)
        for t in range(5, 9):
            (_, (x, _)), (_, (pushed, _)) = (field.roll(state, 2, t) for state in (x, pushed))
        a, b = model.energy_block.norm(x), model.energy_block.norm(pushed)
        expected = (b - a).norm(dim=-1) / unit
        assert relative(found.distances[-1], expected.detach()) < 1e-10


def test_what_was_interrupted_is_not_lost(monkeypatch):
    model, extra = bowl(*K)
    idx = torch.randint(11, (3, 5))
    whole = transients(model, idx, steps=9, extra=extra)
    looks = 0
    look = Field.look

    def interrupting(self, x, t):
        nonlocal looks
        looks += 1
        if looks == 5:  # the first look is at the state before any step
            raise KeyboardInterrupt
        return look(self, x, t)

    monkeypatch.setattr(Field, "look", interrupting)
    found = transients(model, idx, steps=9, extra=extra)
    assert found.steps == 3
    assert torch.equal(found.moves, whole.moves[:3])


def test_figure():
    model, extra = bowl(*K)
    idx = torch.randint(11, (3, 5))
    found = transients(model, idx, steps=20, extra=extra)
    assert len(convergence_figure(found).axes) == 2
    pushed = stability(model, idx, settle=5, steps=5, extra=extra)
    assert len(convergence_figure(found, pushed).axes) == 3


def test_shares_at_rest_by_step():
    moves = torch.tensor([[[1.0, 1.0, 0.0]], [[0.0, 1.0, 0.0]], [[0.0, 1.0, 0.0]]])
    found = Transients(tolerance=0.5, trained_steps=1, moves=moves, x=torch.zeros(1, 3, 2))
    assert found.at_rest(range(1)).tolist() == [0, 1, 1, 1]
    assert found.at_rest(range(1, 2)).tolist() == [0, 0, 0, 0]  # still moves
    assert found.at_rest(range(3)).tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3, 2 / 3])


def test_stretches_of_positions_double():
    assert doubling(1) == [range(1)]
    assert doubling(6) == [range(1), range(1, 2), range(2, 4), range(4, 6)]


def test_mistakes():
    model = randomised(config())
    idx = torch.randint(11, (2, 7))
    with pytest.raises(ValueError, match="tolerance = 0"):
        transients(model, idx, steps=3, tolerance=0)
    with pytest.raises(ValueError, match="size = -1"):
        stability(model, idx, settle=3, steps=3, size=-1)
    with pytest.raises(ValueError, match="steps = 0"):
        transients(model, idx, steps=0)
    with pytest.raises(ValueError, match="has no energy"):
        transients(randomised(config(block="rgpt")), idx, steps=3)
