"""Decoding with kept keys against the full forward pass."""

import itertools

import pytest
import torch

from nrgpt.decode.cache import Cache
from nrgpt.decode.generate import generate
from tests.models import BLOCKS, COUPLINGS, DESCENDING, MASKS, RATES, config, randomised, relative

ENERGIES = [
    {"mask": mask, "coupling": coupling} for mask, coupling in itertools.product(MASKS, COUPLINGS)
]
VARIANTS = [
    *ENERGIES,
    *({"rate": rate} for rate in RATES),
    *({"feedforward": name} for name in ("ff1", "ff2", "memory")),
    *({"block": block} for block in BLOCKS[1:]),
    *DESCENDING,
]


FREEZABLE = [
    v for v in VARIANTS if v.get("block") != "gpt" and not {"past", "start", "prelude"} & set(v)
]


def extend(model, idx, cache, plans, counts=None):
    """Last states of tokens that follow those in the cache."""
    positions = cache.begin(*idx.shape, idx.device)
    x = model.extend(idx, positions, plans, cache)
    if cache.frozen:
        plans.at(0).keep(x, 0, cache)
    cache.end(idx.shape[1] if counts is None else counts)
    return x


def extended(model, idx, parts, *, frozen=False, stacked=False):
    """Last states of all tokens, computed in parts."""
    cache, plans = Cache(13, frozen=frozen), model.plan(stacked=stacked)
    return torch.cat([extend(model, part, cache, plans) for part in idx.split(parts, 1)], dim=1)


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_parts_equal_the_whole(fields):
    model = randomised(config(**fields))
    idx = torch.randint(11, (3, 13))
    *_, whole = model.states(idx)
    for parts, stacked in itertools.product(([13], [1] * 13, [4, 1, 1, 5, 2]), (False, True)):
        assert relative(extended(model, idx, parts, stacked=stacked), whole) < 1e-12


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_rows_of_unequal_length(fields):
    model = randomised(config(**fields))
    idx = torch.randint(11, (3, 13))
    *_, whole = model.states(idx)
    lengths = [1, 6, 4]
    cache, plans = Cache(13), model.plan(stacked=True)
    padded = idx[:, :6].clone()
    padded[0, 1:], padded[2, 4:] = 0, 9
    extend(model, padded, cache, plans, lengths)
    for count in (1, 2, 1):
        positions = torch.tensor(lengths)[:, None] + torch.arange(count)
        x = extend(model, idx.gather(1, positions), cache, plans)
        expected = whole.gather(1, positions[..., None].expand(-1, -1, 9))
        assert relative(x, expected) < 1e-12
        lengths = [n + count for n in lengths]
        if len(lengths) == 3:  # one row leaves
            cache.keep_rows([0, 2])
            idx, whole, lengths = idx[[0, 2]], whole[[0, 2]], [lengths[0], lengths[2]]


@pytest.mark.parametrize("fields", FREEZABLE, ids=str)
def test_a_frozen_past_is_the_last_states_of_earlier_tokens(fields):
    """A block applied to (last states of the past, the new token's state) moves the new token as
    the frozen cache must: a causal block's last token sees the others as they are."""
    model = randomised(config(**fields))
    idx = torch.randint(11, (2, 9))
    found = extended(model, idx, [6, 1, 1, 1], frozen=True)
    *_, past = model.states(idx[:, :6])
    plans = model.plan()
    for A in range(6, 9):
        x = model.embed(idx[:, : A + 1])[:, A:]
        for t in range(model.cfg.steps):
            x = model.blocks[0](torch.cat([past, x], dim=1), t, plans.at(0))[:, A:]
        past = torch.cat([past, x], dim=1)
    assert relative(found, past) < 1e-12
    *_, exact = model.states(idx)
    assert relative(found, exact) > 1e-6  # it is another model


def test_in_float32():
    model = randomised(config()).float()
    idx = torch.randint(11, (3, 13))
    logits, _ = model(idx)
    found = model.readout(extended(model, idx, [5] + [1] * 8))
    assert (found - logits).abs().max() < 1e-5


def test_memory():
    """Keys alone, once for each step; once in all if frozen; for full rank, shared by the heads."""

    def numbers(frozen, **fields):
        cache, model = Cache(13, frozen=frozen), randomised(config(**fields))
        extend(model, torch.randint(11, (2, 5)), cache, model.plan())
        return sum(kept.numel() for room in cache.kept.values() for kept in room)

    one_set = 2 * 13 * 9
    assert numbers(False) == 3 * one_set
    assert numbers(True) == one_set
    assert numbers(False, coupling="full") == 3 * one_set
    assert numbers(False, block="gpt") == 2 * 3 * one_set


def test_mistakes():
    model = randomised(config())
    cache, plans = Cache(13), model.plan()
    extend(model, torch.randint(11, (2, 12)), cache, plans)
    with pytest.raises(ValueError, match="3 rows; this cache holds 2"):
        extend(model, torch.randint(11, (3, 1)), cache, plans)
    with pytest.raises(ValueError, match=r"holds 12 tokens; 2 more do not fit .* 13"):
        extend(model, torch.randint(11, (2, 2)), cache, plans)
    with pytest.raises(ValueError, match="cache = 'frozen': must be 'exact' or 'none' for a gpt"):
        generate(randomised(config(block="gpt")), [[1]], max_new_tokens=1, cache="frozen")
