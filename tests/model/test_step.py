"""One step: what moves, what is observed, and how short the way is."""

import sys
from pathlib import Path

import pytest
import torch

import nrgpt
from nrgpt.decode.generate import stream
from tests.models import COUPLINGS, MASKS, RATES, config, randomised, relative, tokens

PACKAGE = Path(nrgpt.__file__).parent


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("mask", MASKS)
def test_a_move_goes_where_its_observation_says(mask, coupling, rate):
    model = randomised(config(mask=mask, coupling=coupling, rate=rate, bias=True))
    plan = model.energy_block.plan()
    x = model.embed(tokens(model.cfg)[0])
    for t in range(5):
        seen = plan.observe(x, t)
        assert relative(seen.g, model.energy_block.norm(x)) < 1e-12
        assert relative(seen.energy, sum(model.energies(x).values())) < 1e-12
        moved = plan.move(x, t)
        assert relative(moved - x, seen.update) < 1e-10
        x = moved


def test_dropout_multiplies_the_update():
    model = randomised(config())
    plan = model.energy_block.plan()
    x = model.embed(tokens(model.cfg)[0])
    mask = torch.rand(1, *x.shape, dtype=x.dtype)
    assert relative(plan.move(x, 0, masks=mask) - x, plan.observe(x, 0).update * mask[0]) < 1e-12


def test_a_plan_sees_weights_as_they_were():
    """One forward pass, one set of weights: a plan is made anew for the next."""
    model = randomised(config(rate="free"))
    x = model.embed(tokens(model.cfg)[0]).detach()
    plan = model.energy_block.plan()
    before = plan.move(x, 0)
    with torch.no_grad():
        model.energy_block.rate.eta.mul_(2)
    assert torch.equal(plan.move(x, 0), before)
    assert relative(model.energy_block.plan().move(x, 0), before) > 1e-3


def calls(function):
    """The functions of the package that are called, comprehensions apart, and their files."""
    found = []

    def look(frame, event, argument):
        code = frame.f_code
        path = Path(code.co_filename)
        is_ours = path.is_relative_to(PACKAGE) and (
            code.co_name[0] != "<" or code.co_name == "<lambda>"
        )
        if event == "call" and is_ours:
            found.append((path.relative_to(PACKAGE).as_posix(), code.co_name))

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found, {path for path, _ in found}


@torch.no_grad()
def test_the_way_of_a_step_is_short():
    """So that a reader finds it. Two terms, on a CPU."""
    model = randomised(config())
    block, x = model.energy_block, model.embed(tokens(model.cfg)[0])
    plan = block.plan()
    found, files = calls(lambda: block(x, 0, plan))
    assert len(found) <= 12, found
    assert len(files) <= 4, files


def test_the_way_of_a_cached_token_is_short():
    """Of a model of two steps, from asking for the token to having it."""
    texts = stream(randomised(config(steps=2)), [[1, 2, 3]], max_new_tokens=5)
    next(texts), next(texts)
    found, files = calls(lambda: next(texts))
    assert len(found) <= 31, found
    assert len(files) <= 6, files
