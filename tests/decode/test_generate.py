import gc
import weakref

import pytest
import torch

from nrgpt import EnergyTerm
from nrgpt.decode.decoder import GraphedDecoder
from nrgpt.decode.generate import Sampling, generate, run, stream
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
    """Greedy, without cache, batches or padding: a whole pass over what is seen, each time."""
    text = list(prompt)
    context = model.cfg.context
    start = max(0, len(text) - context)
    for _ in range(new):
        if len(text) - start > context:
            start = len(text) - (context - context // 4)
        logits, _ = model(torch.tensor([text[start:]]), steps=steps)
        text.append(int(logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("cache", ["exact", "none"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_batch_says_what_each_prompt_says_alone(block, cache):
    model = talkative(block=block)
    expected = [one_by_one(model, prompt, 19) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=19, cache=cache) == expected
    assert model.generate(PROMPTS, max_new_tokens=19, cache=cache) == expected
    assert len({tuple(tokens) for tokens in expected}) >= len(PROMPTS) - 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": "inclusive", "bias": True},
        {"coupling": "full", "rate": "free_per_step"},
        {"rate": "state", "feedforward": "ff1"},
    ],
    ids=str,
)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_decoder_for_gpus_says_the_same(block, fields):
    """On a CPU, so without a recording: fixed shapes, tokens read one step late, memory reused."""
    model = talkative(block=block, **fields)
    free = generate(model, PROMPTS, max_new_tokens=19, cache="none")
    for stops in (set(), {free[1][4]}):
        expected = generate(model, PROMPTS, max_new_tokens=19, cache="none", stop=stops)
        new = [[] for _ in PROMPTS]
        decoder = GraphedDecoder(model, PROMPTS, "exact", None)
        for tokens in run(decoder, 19, stops, Sampling(), None):
            for row, token in tokens.items():
                new[row].append(token)
        assert new == expected


def test_a_decoder_goes_when_nobody_needs_it():
    """Otherwise its GPU memory would have to wait for Python's garbage collector."""
    gc.disable()
    try:
        decoder = GraphedDecoder(talkative(), PROMPTS, "exact", None)
        decoder.next_logits()
        seen = weakref.ref(decoder)
        del decoder
        assert seen() is None
    finally:
        gc.enable()


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


def test_several_stop_tokens():
    model = talkative()
    free = generate(model, PROMPTS, max_new_tokens=9)
    stops = {free[0][0], free[1][4]}
    first = [min([i for i, t in enumerate(row) if t in stops], default=9) for row in free]
    stopped = generate(model, PROMPTS, max_new_tokens=9, stop=stops)
    assert stopped == [row[:n] for row, n in zip(free, first, strict=True)]
    assert len(set(first)) > 1


def test_streaming_gives_the_same_tokens_as_they_come():
    model = talkative()
    free = generate(model, PROMPTS, max_new_tokens=9)
    stop = free[1][4]
    rows = [[] for _ in PROMPTS]
    for count, tokens in enumerate(stream(model, PROMPTS, max_new_tokens=9, stop=stop), 1):
        for row, token in tokens.items():
            assert len(rows[row]) == count - 1  # none comes late
            rows[row].append(token)
    assert rows == generate(model, PROMPTS, max_new_tokens=9, stop=stop)


def test_extra_terms_join_in():
    class Attract(EnergyTerm):
        def __init__(self, direction):
            super().__init__()
            self.direction = direction

        def energy(self, z, past):
            return -(z @ self.direction)

    model = talkative()
    extra = {"attract": Attract(5 * torch.randn(9, dtype=torch.float64))}
    options = {"max_new_tokens": 9, "extra": extra}
    said = generate(model, PROMPTS, **options)
    assert said == generate(model, PROMPTS, cache="none", **options)
    assert said != generate(model, PROMPTS, max_new_tokens=9)


def test_a_term_with_keys_of_its_own_is_cached():
    class Follow(EnergyTerm):
        """A token follows those most like it."""

        def keys(self, z, g):
            return g[:, None]

        def energy(self, z, past):
            return -past.logsumexp(z[:, None], 0.3, strict=True)[:, 0]

    model = talkative()
    options = {"max_new_tokens": 9, "extra": {"follow": Follow()}}
    said = generate(model, PROMPTS, **options)
    assert said == generate(model, PROMPTS, cache="none", **options)
    assert said != generate(model, PROMPTS, max_new_tokens=9)


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


def shares(model, count=20_000, **options):
    generator = torch.Generator().manual_seed(1)
    prompts = [[1, 2, 3]] * count
    samples = generate(model, prompts, generator=generator, max_new_tokens=1, **options)
    return torch.tensor(samples).flatten().bincount(minlength=11) / count


def test_top_k_and_top_p_cut_and_keep_the_proportions():
    model = talkative()
    logits, _ = model(torch.tensor([[1, 2, 3]]))
    p = logits[0, -1].softmax(-1).detach()
    order = p.argsort(descending=True)
    for options, kept in (
        ({"top_k": 3}, 3),
        ({"top_p": float(p[order[:2]].sum()) + 1e-6}, 3),
        ({"top_p": float(p[order[:2]].sum()) - 1e-6}, 2),
        ({"top_p": 1e-9}, 1),
        ({"top_k": 100, "top_p": 1.0}, 11),
        ({"top_k": 3, "top_p": 1e-9}, 1),
    ):
        expected = torch.zeros(11, dtype=p.dtype)
        expected[order[:kept]] = p[order[:kept]] / p[order[:kept]].sum()
        found = shares(model, temperature=1.0, **options)
        assert (found - expected).abs().max() < 0.02, options
        assert not found[expected == 0].any(), options


def test_repetition_penalty():
    model = talkative()
    assert generate(model, PROMPTS, max_new_tokens=9, repetition_penalty=1.0) == generate(
        model, PROMPTS, max_new_tokens=9
    )
    model.head.data.abs_()  # logits of one sign for most tokens, so that a penalty must act
    for prompt, new in zip(
        PROMPTS[:3],
        generate(model, PROMPTS[:3], max_new_tokens=4, repetition_penalty=1e9),
        strict=True,
    ):
        text = list(prompt)
        for token in new:
            logits, _ = model(torch.tensor([text]))
            logits = logits[0, -1].clone()
            for old in set(text):
                logits[old] = logits[old] / 1e9 if logits[old] > 0 else logits[old] * 1e9
            assert token == int(logits.argmax())
            text.append(token)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens = -1"),
        ({"temperature": -0.1}, "temperature = -0.1: must be at least 0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
        ({"cache": "exakt"}, "did you mean 'exact'"),
        ({"steps": 0}, "steps = 0"),
    ],
)
def test_wrong_options(options, said):
    with pytest.raises(ValueError, match=said):
        generate(talkative(), PROMPTS, **{"max_new_tokens": 1, **options})


def test_empty_prompts():
    model = talkative()
    for prompts in ([], [[1], []]):
        with pytest.raises(ValueError, match="at least one token"):
            generate(model, prompts, max_new_tokens=1)


def test_a_token_beyond_the_vocabulary():
    with pytest.raises(ValueError, match="token 11, and the vocabulary ends at 10"):
        generate(talkative(), [[11]], max_new_tokens=1)
