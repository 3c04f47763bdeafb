"""The Energy-Based Transformer: the slope of its energy, causality, places computed at once."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import nrgpt
from nrgpt import LanguageModel, ModelConfig
from nrgpt.model.flops import flops_per_token

from .. import reference
from ..models import NORMS, config, randomised, relative
from ..models import tokens as make_tokens
from ..models import weights as make_weights

EBT = {"block": "ebt", "layers": 2, "steps": 3}


@pytest.mark.parametrize("norm", NORMS)
def test_against_the_reference(norm):
    """What it says after each step, and every gradient of the loss over all steps."""
    cfg = config(**EBT, norm=norm, bias=True, attention_bias=True)
    model = randomised(cfg).train()
    w = make_weights(model)
    idx, targets = make_tokens(cfg)
    expected = reference.ebt_states(cfg, w, idx)
    for x, wanted in zip(list(model.states(idx))[1:], expected, strict=True):
        assert relative(x, wanted) < 1e-10
    losses = [F.cross_entropy(x.flatten(0, 1), targets.flatten()) for x in expected]
    _, loss = model(idx, targets, want_logits=False)
    assert abs(loss.item() - sum(losses).item() / 3) < 1e-12
    loss.backward()
    (sum(losses) / 3).backward()
    for name, parameter in model.named_parameters():
        if w[name].grad is None:  # an offset of the energy
            assert parameter.grad is None or not parameter.grad.any(), name
        elif parameter.requires_grad:
            scale = max(w[name].grad.norm().item(), 1e-6)
            assert (parameter.grad - w[name].grad).norm() < 1e-8 * scale, name


def test_evaluated_by_what_it_says_last():
    model = randomised(config(**EBT))
    idx, targets = make_tokens(model.cfg)
    logits, loss = model.train()(idx, targets, dropout=False)
    assert (
        abs(loss.item() - F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()) < 1e-12
    )
    with torch.no_grad():  # the slope inside needs no graph around it
        assert torch.equal(model(idx)[0], logits)


def test_all_places_at_once_are_each_as_if_alone():
    model = randomised(config(**EBT))
    idx, _ = make_tokens(model.cfg, length=9)
    at_once = model(idx)[0]
    for A in range(9):
        assert relative(model(idx[:, : A + 1])[0][:, -1], at_once[:, A]) < 1e-12


def test_causal_and_candidates_see_themselves_alone():
    model = randomised(config(**EBT))
    idx, _ = make_tokens(model.cfg)
    changed = idx.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] - after[:, 4:]).norm(dim=-1).min() > 1e-8
    plan = model.plan().blocks[0]
    v, seen = plan.begin(model.embed(idx))
    v = torch.randn_like(v)
    J = torch.func.jacrev(lambda v: plan.energy(v, seen))(v)  # (batch, places, batch, places, V)
    size = J.norm(dim=-1).permute(0, 2, 1, 3)
    diagonal = torch.diag_embed(torch.ones(2))[..., None, None] * torch.eye(7)
    assert (size[diagonal == 0] == 0).all()
    assert (size.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1) > 0).all()


def test_the_slope_is_the_energys():
    model = randomised(config(**EBT))
    idx, _ = make_tokens(model.cfg)
    plan = model.plan().blocks[0]
    v, seen = plan.begin(model.embed(idx))
    v = torch.randn_like(v).requires_grad_()
    (slope,) = torch.autograd.grad(plan.energy(v, seen).sum(), v)
    look = plan.observe(v.detach(), 0, seen)
    assert relative(-look.force, slope) < 1e-12
    assert relative(look.update, -model.blocks[0].rate * slope) < 1e-12
    assert relative(plan.move(v.detach(), 0, seen) - v.detach(), look.update) < 1e-12


def test_watched_certified_and_continued():
    model = randomised(config(**EBT), std=0.1)
    idx, targets = make_tokens(model.cfg)
    seen = nrgpt.trajectory(model, idx, targets, steps=5)
    assert seen.energies.keys() == {"total", "candidate"}
    assert seen.mean_loss().shape == (6,)
    assert seen.loss[0].allclose(torch.tensor(11.0).double().log())  # it begins by saying nothing
    assert "transformer's output" in str(model.certificate())
    new = model.generate([[1, 2, 3], [4]], max_new_tokens=4)
    logits = model(torch.tensor([[1, 2, 3]]))[0]
    assert new[0][0] == logits[0, -1].argmax()
    assert new == model.generate([[1, 2, 3], [4]], max_new_tokens=4, cache="none")
    with pytest.raises(ValueError, match="cache = 'frozen': must be 'exact' or 'none'"):
        model.generate([[1]], max_new_tokens=1, cache="frozen")
    with pytest.raises(ValueError, match="extra terms q: only block='nrgpt'"):
        model(idx, extra={"q": None})


@pytest.mark.parametrize(("layers", "steps"), [(1, 1), (2, 1), (1, 3)])
def test_flops_equal_the_counter(layers, steps):
    cfg = config(block="ebt", layers=layers, steps=steps, hidden_factor=3)
    with torch.device("meta"):
        model = LanguageModel(cfg)
        idx = torch.zeros(3, 13, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(idx)
    options = {"tokens": 13, "batch": 3}
    forward = counter.get_total_flops()
    assert flops_per_token(cfg, training=False, **options) * 39 == pytest.approx(forward)
    with FlopCounterMode(display=False) as counter:
        model.train()(idx, idx, want_logits=False)[1].backward()
    update = counter.get_total_flops()
    assert flops_per_token(cfg, **options) * 39 == pytest.approx(update)
    assert 2 * forward < update < 3 * forward


def test_a_step_costs_about_two_passes_of_a_gpt():
    """Forward and backward through the layers; and the observed tokens one pass, once."""
    sizes = {"width": 64, "heads": 4, "vocab_size": 65, "context": 64, "hidden_factor": 4}
    gpt = flops_per_token(ModelConfig(block="gpt", steps=8, **sizes), training=False)
    gpt -= 2 * 64 * 65
    cost = [
        flops_per_token(ModelConfig(block="ebt", layers=8, steps=T, **sizes), training=False) / gpt
        for T in (1, 2, 3)
    ]
    assert cost[2] - cost[1] == pytest.approx(cost[1] - cost[0]) == pytest.approx(2, rel=0.03)
    assert cost[0] == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dropout": 0.1}, r"dropout = 0\.1: must be 0\.0 with block = 'ebt'"),
        ({"tied": False}, "tied = False: must be True with block = 'ebt'"),
        ({"head_bias": True}, "head_bias = True: must be False with block = 'ebt'"),
        ({"layers": 0}, "layers = 0: must be at least 1"),
    ],
)
def test_what_it_cannot_be_combined_with(fields, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig(**{"block": "ebt", **fields})
