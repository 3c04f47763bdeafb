"""Weights that are not numbers, extreme temperatures, threads."""

import threading

import pytest
import torch

from nrgpt import LanguageModel
from nrgpt.decode.generate import Sampling

from ..models import BLOCKS, config
from ..processes import patience


@pytest.mark.parametrize("cache", ["exact", "none"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_said_instead_of_token_0(cache, bad):
    model = LanguageModel(config())
    with torch.no_grad():
        model.final_norm.gamma.fill_(bad)
    with pytest.raises(ValueError, match="logits are not finite"):
        model.generate([[1, 2], [3]], max_new_tokens=3, cache=cache)
    with pytest.raises(ValueError, match="logits are not finite"):
        model.generate([[1, 2], [3]], max_new_tokens=3, cache=cache, stop=0)
    with pytest.raises(ValueError, match="logits are not finite"):
        model.generate([[1, 2], [3]], max_new_tokens=3, cache=cache, temperature=1.0)


@pytest.mark.parametrize("heat", [1e-45, 1e-300, 1e-8, 1e38, 1e300])
def test_any_positive_temperature_gives_tokens(heat):
    logits = torch.tensor([[1.0, 5.0, -3.0], [100.0, -100.0, 99.0]])
    chosen = Sampling(temperature=heat).choose(logits, None, None)
    assert chosen.tolist() == [1, 0] or heat > 1


@pytest.mark.parametrize("share", [1e-300, 1e-45, 1e-8])
def test_the_likeliest_token_is_always_kept(share):
    logits = torch.tensor([[1.0, 5.0, -3.0], [0.0, 0.0, 7.0]])
    chosen = Sampling(temperature=1.0, top_p=share).choose(logits, None, None)
    assert chosen.tolist() == [1, 2]


@pytest.mark.parametrize("cache", ["exact", "none"])
@pytest.mark.parametrize("block", BLOCKS)
def test_threads_that_share_a_model_in_training_mode(block, cache):
    model = LanguageModel(config(block=block, dropout=0.5)).train()
    prompts = [[1, 2, 3], [4]]
    expected = model.generate(prompts, max_new_tokens=20, cache=cache)
    found = []

    def go():
        for _ in range(10):
            found.append(model.generate(prompts, max_new_tokens=20, cache=cache))

    threads = [threading.Thread(target=go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience())
    assert model.training
    assert found == [expected] * 30
