"""Texts with missing tokens."""

import numpy as np
import torch

from nrgpt.data.masking import IGNORED, MaskedStream, Masking
from nrgpt.data.shards import TokenStream
from nrgpt.model.network import IGNORED_TARGET


def test_what_is_missing_is_the_target_and_nothing_else():
    texts = torch.randint(9, (50, 40))
    given, targets = Masking(0.2, 9)(texts, seed=1, step=2)
    missing = given == 9
    assert torch.equal(missing, targets != IGNORED)
    assert torch.equal(targets[missing], texts[missing])
    assert torch.equal(given[~missing], texts[~missing])
    assert 0.17 < missing.double().mean() < 0.23
    assert IGNORED == IGNORED_TARGET


def test_every_text_misses_a_token_and_draws_are_repeatable():
    texts = torch.zeros(200, 3, dtype=torch.long)
    masking = Masking(1e-9, 1)
    given, _ = masking(texts, seed=0, step=0)
    assert (given.sum(-1) == 1).all()
    assert torch.equal(masking(texts, seed=0, step=0)[0], given)
    for other in ({"seed": 1}, {"step": 1}, {"rank": 1}):
        assert not torch.equal(masking(texts, **{"seed": 0, "step": 0, **other})[0], given)


def test_batches_of_a_stream():
    stream = TokenStream("val", [np.arange(100) % 7])
    sizes = {"seed": 3, "step": 5, "size": 4, "context": 12}
    given, targets = MaskedStream(stream, Masking(0.3, 7)).batch(**sizes)
    texts, _ = stream.batch(**sizes)
    assert torch.equal(torch.where(given == 7, targets, given), texts)
