import pytest
import torch

from nrgpt.generate import generate
from tests.models import BLOCKS, config, randomised

PROMPTS = [[3], [1, 2, 3, 4, 5, 6], [7, 8, 9], [10] * 13, list(range(11)) * 2]
"""Of unequal length; the model's context is 13, and the last prompt has 22 tokens."""


def talkative(**fields):
    """A model that does not say the same token again and again: large embeddings, own head."""
    model = randomised(config(tied=False, **fields))
    with torch.no_grad():
        model.tokens.mul_(5)
        model.positions.mul_(5)
    return model


def one_by_one(model, prompt, new, steps=None):
    """Greedy, without batches or padding: the last ``context`` tokens, a whole pass each time."""
    text = list(prompt)
    for _ in range(new):
        logits, _ = model(torch.tensor([text[-model.cfg.context :]]), steps=steps)
        text.append(int(logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_batch_says_what_each_prompt_says_alone(block):
    model = talkative(block=block)
    expected = [one_by_one(model, prompt, 9) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=9) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)


def test_stop():
    model = talkative()
    free = generate(model, PROMPTS, max_new_tokens=9)
    stops = {token for tokens in free for token in tokens}
    lengths = set()
    for stop in stops:
        stopped = generate(model, PROMPTS, max_new_tokens=9, stop=stop)
        expected = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in free]
        assert stopped == expected
        lengths |= {len(tokens) for tokens in stopped}
    assert {0, 9} < lengths  # some stop at once, some never, some between


def test_steps():
    model = talkative(block="rgpt")
    for steps in (1, 5):
        expected = [one_by_one(model, prompt, 9, steps) for prompt in PROMPTS]
        assert generate(model, PROMPTS, max_new_tokens=9, steps=steps) == expected
    assert expected != generate(model, PROMPTS, max_new_tokens=9)


def test_no_new_tokens():
    assert generate(talkative(), PROMPTS[:2], max_new_tokens=0) == [[], []]


@pytest.mark.parametrize("training", [True, False])
def test_dropout_sleeps_and_the_mode_is_restored(training):
    model = talkative(dropout=0.5)
    expected = generate(model, PROMPTS, max_new_tokens=9)
    model.train(training)
    assert generate(model, PROMPTS, max_new_tokens=9) == expected
    assert model.training is training


def test_no_gradients_are_left():
    model = talkative()
    generate(model, PROMPTS, max_new_tokens=2)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_samples_follow_the_softmax(temperature):
    model = talkative()
    count = 20_000
    generator = torch.Generator().manual_seed(1)
    prompts = [[1, 2, 3]] * count
    options = {"max_new_tokens": 1, "temperature": temperature}
    samples = torch.tensor(generate(model, prompts, generator=generator, **options))
    logits, _ = model(torch.tensor([[1, 2, 3]]))
    expected = (logits[0, -1] / temperature).softmax(-1)
    shares = samples.flatten().bincount(minlength=11) / count
    assert (shares - expected).abs().max() < 5 * (0.25 / count) ** 0.5
    again = torch.tensor(
        generate(model, prompts, generator=torch.Generator().manual_seed(1), **options)
    )
    assert torch.equal(again, samples)


def test_empty_prompts():
    model = talkative()
    for prompts in ([], [[1], []]):
        with pytest.raises(ValueError, match="at least one token"):
            generate(model, prompts, max_new_tokens=1)


def test_a_token_beyond_the_vocabulary():
    with pytest.raises(ValueError, match="token 11, and the vocabulary ends at 10"):
        generate(talkative(), [[11]], max_new_tokens=1)
