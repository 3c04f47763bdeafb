"""Trajectories agree with the model's own states, energies, forces and logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nrgpt
from nrgpt.model.network import IGNORED_TARGET

from ..models import (
    BLOCKS,
    COUPLINGS,
    FEEDFORWARDS,
    MASKS,
    NORMS,
    RATES,
    config,
    forces,
    randomised,
    tokens,
)
from ..models import relative as relative_error

EXACT = 1e-12
LONGER = 5
"""Steps of these tests: more than the 3 that the models have."""

VARIANTS = [
    *({"mask": mask, "coupling": coupling} for mask in MASKS for coupling in COUPLINGS),
    *({**fields, "bias": True, "feedforward_scale": True} for fields in FEEDFORWARDS),
    *({"norm": norm} for norm in NORMS),
    *({"rate": rate} for rate in RATES),
]


class Pull(nrgpt.EnergyTerm):
    """A term of the user's: its force comes from autograd."""

    def __init__(self, direction: Tensor):
        super().__init__()
        self.register_buffer("direction", direction)

    def energy(self, z, keys):
        return -(z @ self.direction).square()


def watched(steps=LONGER, extra=None, **fields):
    cfg = config(**fields)
    model = randomised(cfg)
    idx, targets = tokens(cfg, batch=3)
    seen = nrgpt.trajectory(model, idx, targets, steps, extra)
    states = torch.stack(list(model.states(idx, steps=steps, extra=extra))).detach()
    return model, idx, targets, seen, states


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_energies_and_sizes_are_those_of_the_models_states(fields):
    model, _, _, seen, states = watched(**fields)
    assert seen.steps == LONGER
    assert seen.trained_steps == 3
    assert relative_error(seen.size, states.norm(dim=-1)) < EXACT
    expected = [model.energies(x) for x in states]
    assert set(seen.energies) == {"total", *expected[0]}
    for name in expected[0]:
        assert relative_error(seen.energies[name], torch.stack([e[name] for e in expected])) < EXACT
    total = torch.stack([sum(e.values(), torch.zeros(3, 7)) for e in expected])
    assert relative_error(seen.energies["total"], total) < EXACT
    g = model.energy_block.norm(states)
    assert seen.move.shape == (LONGER, 3, 7)
    assert relative_error(seen.move, (g[1:] - g[:-1]).norm(dim=-1)) < EXACT


def test_the_first_token_sees_nothing():
    *_, seen, _ = watched()
    assert (seen.energies["attention"][:, :, 0] == 0).all()
    assert (seen.energies["attention"][:, :, 1:] != 0).all()


@pytest.mark.parametrize("fields", [{}, *FEEDFORWARDS], ids=str)
def test_force_norms_equal_autograd(fields):
    model, _, _, seen, states = watched(bias=True, **fields)
    assert seen.force is not None
    plan = model.energy_block.plan()
    plan.normalise = lambda g: g  # it is given g
    for t, x in enumerate(states):
        g = model.energy_block.norm(x)
        # Token by token, the others held still: E_A is a function of g_A alone.
        for A in range(g.shape[1]):
            g_A = g[:, A].clone().requires_grad_()
            with_A = torch.cat([g[:, :A], g_A[:, None], g[:, A + 1 :]], dim=1)
            energies = plan.energies(with_A)
            E_A = sum(energy[:, A].sum() for energy in energies.values())
            (slope,) = torch.autograd.grad(E_A, g_A)
            assert relative_error(seen.force[t, :, A], slope.norm(dim=-1)) < 1e-10


def test_extra_terms_are_watched_and_act():
    extra = {"pull": Pull(torch.randn(9, dtype=torch.float64))}
    model, idx, _, seen, states = watched(extra=extra)
    assert list(seen.energies) == ["total", "attention", "feedforward", "pull"]
    pulled = torch.stack([model.energies(x, extra)["pull"] for x in states])
    assert relative_error(seen.energies["pull"], pulled) < EXACT
    assert seen.force is not None
    summed = sum(forces(model, states[-1], extra).values(), torch.zeros_like(states[-1]))
    assert relative_error(seen.force[-1], summed.norm(dim=-1)) < EXACT
    assert relative_error(seen.size, nrgpt.trajectory(model, idx, steps=LONGER).size) > 1e-3


@pytest.mark.parametrize("block", BLOCKS)
def test_readouts_are_the_models_had_it_stopped_there(block):
    cfg = config(block=block)
    model = randomised(cfg)
    idx, targets = tokens(cfg, batch=3)
    targets = targets.clone()
    targets[0, :4] = IGNORED_TARGET
    seen = nrgpt.trajectory(model, idx, targets, energies=block == "nrgpt", top=4)
    assert seen.loss is not None
    for t in range(1, cfg.steps + 1):
        logits, loss = model(idx, targets, steps=t)
        assert loss is not None
        assert relative_error(seen.mean_loss()[t], loss.detach()) < EXACT
        p = logits.softmax(-1).detach()
        assert relative_error(seen.entropy[t], torch.special.entr(p).sum(-1)) < 1e-10
        assert torch.equal(seen.argmax[t], logits.argmax(-1))
        best, which = p.topk(4)
        assert torch.equal(seen.top_tokens[t], which)
        assert relative_error(seen.top_probabilities[t], best) < EXACT
    assert torch.equal(seen.loss.isnan(), (targets == IGNORED_TARGET).expand_as(seen.loss))


def test_logits_in_pieces_are_the_same(monkeypatch):
    _, _, _, whole, _ = watched()
    torch.manual_seed(0)
    monkeypatch.setattr("nrgpt.dynamics.trajectory.LOGITS_AT_ONCE", 4 * 11 + 1)
    _, _, _, pieces, _ = watched()
    for name in ("entropy", "loss", "top_tokens", "top_probabilities"):
        assert relative_error(getattr(pieces, name).double(), getattr(whole, name).double()) < EXACT


def test_streaming_equals_collecting():
    model, idx, targets, seen, _ = watched()
    for state in nrgpt.stream_trajectory(model, idx, targets, LONGER):
        for name, energy in state.energies.items():
            assert torch.equal(energy, seen.energies[name][state.t])
        for name in ("force", "size", "entropy", "loss", "top_tokens", "top_probabilities"):
            assert torch.equal(getattr(state, name), getattr(seen, name)[state.t])
        if state.t == 0:
            assert state.move is None
        else:
            assert torch.equal(state.move, seen.move[state.t - 1])
    assert state.t == LONGER


def test_without_energies_the_same_is_seen():
    model, idx, targets, seen, _ = watched()
    plain = nrgpt.trajectory(model, idx, targets, LONGER, energies=False)
    assert plain.energies == {}
    assert plain.force is None
    for name in ("size", "move", "entropy", "loss", "top_probabilities"):
        assert relative_error(getattr(plain, name), getattr(seen, name)) < EXACT


def test_without_readouts_the_same_is_seen():
    model, idx, targets, seen, _ = watched()
    plain = nrgpt.trajectory(model, idx, steps=LONGER, readouts=False)
    for name in ("force", "size", "move"):
        assert torch.equal(getattr(plain, name), getattr(seen, name))
    assert torch.equal(plain.energies["total"], seen.energies["total"])
    assert plain.entropy is None
    assert plain.loss is None
    assert "top_tokens" not in plain.arrays()
    with pytest.raises(ValueError, match="readouts=False"):
        _ = plain.argmax
    with pytest.raises(ValueError, match="readouts=False leaves out"):
        nrgpt.stream_trajectory(model, idx, targets, readouts=False)


@pytest.mark.parametrize("block", BLOCKS[1:])
def test_baselines_have_no_energy_and_say_so(block):
    cfg = config(block=block)
    model = randomised(cfg)
    idx, _ = tokens(cfg)
    with pytest.raises(ValueError, match=f"block = '{block}' has no energy"):
        nrgpt.stream_trajectory(model, idx)
    seen = nrgpt.trajectory(model, idx, energies=False)
    states = torch.stack(list(model.states(idx))).detach()
    assert relative_error(seen.size, states.norm(dim=-1)) < EXACT
    assert seen.loss is None
    with pytest.raises(ValueError, match="no loss without targets"):
        seen.mean_loss()


def test_watching_leaves_the_model_as_it_was():
    cfg = config(dropout=0.5)
    model = randomised(cfg).train()
    idx, targets = tokens(cfg)
    states = nrgpt.stream_trajectory(model, idx, targets, 10**6)
    for state in itertools.islice(states, 3):
        assert model.training
        assert torch.is_grad_enabled()
        assert not state.size.requires_grad
    first, again = (nrgpt.trajectory(model, idx, targets) for _ in range(2))
    assert torch.equal(first.energies["total"], again.energies["total"])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_autocast_does_not_blur_energies():
    cfg = config()
    model = randomised(cfg).float()
    idx, _ = tokens(cfg)
    with torch.autocast("cpu", torch.bfloat16):
        seen = nrgpt.trajectory(model, idx)
    assert torch.equal(seen.energies["total"], nrgpt.trajectory(model, idx).energies["total"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps = 0: must be a whole number, at least 1"),
        ({"top": 12}, "top = 12: must be in 1 .. vocab_size = 11"),
        ({"targets": torch.zeros(2, 6, dtype=torch.long)}, r"targets have shape \(2, 6\)"),
        ({"extra": {"total": Pull(torch.ones(9))}}, "extra term 'total': that is the name of"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_mistakes_are_named_before_anything_is_computed(options, said):
    cfg = config()
    idx, _ = tokens(cfg)
    with pytest.raises(ValueError, match=said):
        nrgpt.stream_trajectory(randomised(cfg), idx, **options)


def test_an_energy_of_a_wrong_shape_is_named():
    class Wrong(Pull):
        def energy(self, z, keys):
            return z @ self.direction[:, None]

    cfg = config()
    idx, _ = tokens(cfg)
    extra = {"wrong": Wrong(torch.ones(9, dtype=torch.float64))}
    with pytest.raises(ValueError, match=r"term 'wrong': energy has shape \(2, 7, 1\)"):
        nrgpt.trajectory(randomised(cfg), idx, extra=extra)


def test_arrays_hold_everything():
    *_, seen, _ = watched()
    arrays = seen.arrays()
    assert {"idx", "targets", "energy_total", "energy_attention", "force", "move", "loss"} <= set(
        arrays
    )
    assert arrays["energy_total"].shape == (LONGER + 1, 3, 7)
    assert arrays["trained_steps"] == 3
    model, idx = randomised(config()).bfloat16(), torch.zeros(2, 5, dtype=torch.long)
    assert nrgpt.trajectory(model, idx).arrays()["energy_total"].dtype == "float32"


def test_losses_are_cross_entropies_token_by_token():
    model, _, targets, seen, states = watched()
    assert seen.loss is not None
    for t, x in enumerate(states):
        expected = F.cross_entropy(model.readout(x).mT, targets, reduction="none").detach()
        assert relative_error(seen.loss[t], expected) < EXACT
