"""Stopping early, in evaluation and in generation."""

import pytest
import torch

from nrgpt.decode.generate import generate
from nrgpt.dynamics.adaptive import loss_against_steps, stream_adaptive
from nrgpt.dynamics.relax import Stop
from tests.decode.test_generate import PROMPTS, talkative
from tests.models import config, randomised


def test_loss_against_steps():
    model = randomised(config(context=17, steps=8), std=0.2)
    text = torch.randint(11, (3, 16))
    idx, targets = text[:, :-1], text[:, 1:]
    rules = [Stop("kl", tolerance) for tolerance in (0.0, 1e-3, 1e-1, 1e9)]
    full, *costs = loss_against_steps(model, idx, targets, rules)
    assert full.stop is None
    assert abs(full.loss - model(idx, targets)[1].item()) < 1e-6
    assert [cost.stop for cost in costs] == rules
    steps = [cost.mean_steps for cost in costs]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == full.mean_steps == 8
    assert steps[-1] == 1
    assert 1 < steps[2] < 8
    assert all(cost.mean_steps <= cost.computed <= 8 for cost in costs)


@pytest.mark.parametrize("fields", [{}, {"coupling": "full", "rate": "free_per_step"}], ids=str)
def test_generation_with_a_rule_that_never_holds_is_the_plain_one(fields):
    model = talkative(**fields)
    tokens = list(stream_adaptive(model, PROMPTS, Stop("kl", 0.0), max_new_tokens=9))
    rows = [list(row) for row in zip(*(new for new, _ in tokens), strict=True)]
    assert rows == generate(model, PROMPTS, max_new_tokens=9)


@pytest.mark.parametrize("rule", ["energy", "force", "entropy", "kl", "argmax"])
def test_early_stops_rest_for_later_tokens(rule):
    """Compared with whole passes in which every token stays where it was stopped."""
    model = talkative(steps=6)
    stop = Stop(rule, {"force": 8.0, "entropy": 2.0}.get(rule, 0.2))
    prompt = [3, 1, 4]
    text, taken = list(prompt), [6] * len(prompt)
    found = stream_adaptive(model, [prompt], stop, max_new_tokens=9)
    plan = model.energy_block.plan()
    for count, (new, steps) in enumerate(found):
        if count > 0:
            taken.append(steps[0])
        x = model.embed(torch.tensor([text]))
        for t in range(6):
            moved = plan.move(x, t)
            still = torch.tensor(taken) <= t
            x = torch.where(still[None, :, None], x, moved)
        assert new[0] == int(model.readout(x[0, -1]).argmax())
        text += new
        if len(text) == 13:
            break
    assert len(text) > 8
    assert min(taken) < 6, "no token stopped early: choose another tolerance"


def test_a_baseline_has_no_energy():
    with pytest.raises(ValueError, match="has no energy"):
        next(stream_adaptive(talkative(block="rgpt"), [[1]], Stop("kl"), max_new_tokens=1))
