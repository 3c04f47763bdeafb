"""Texts that join and leave at any time get what they would get alone."""

import queue
import threading
import time

import pytest
import torch

import nrgpt
from nrgpt.decode.generate import Sampling
from nrgpt.dynamics.adaptive import stream_adaptive
from nrgpt.dynamics.relax import Stop
from nrgpt.serve.engine import Engine, Failed, Finished, Group, Job, Token, Way

from ..models import config, randomised
from ..processes import patience, wait_for


def heard(events):
    """All that a job was told, to its end."""
    told = []
    while not told or isinstance(told[-1], Token):
        told.append(events.get(timeout=patience()))
    return told[:-1], told[-1]


def job(text, most, way, **options):
    events = queue.Queue()
    made = Job(
        text=list(text), most=most, way=way, **{"sampling": Sampling(), **options}, send=events.put
    )
    return made, events


@pytest.fixture(params=["nrgpt", "gpt", "settled"])
def model(request):
    if request.param == "settled":
        return randomised(config(past="settled", prelude=1)).float()
    return randomised(config(block=request.param)).float()


def test_every_text_is_what_generate_gives(model):
    """They come one after the other, with different lengths, numbers of steps and ends, some past
    the context of 13."""
    engine = Engine(model, rows=5).start()
    try:
        asked = []
        for i in range(24):
            prompt = torch.randint(11, (1 + i % 9,)).tolist()
            steps = 2 + i % 2
            made, events = job(prompt, 3 + (7 * i) % 30, Way(steps), ends=frozenset({i % 11}))
            asked.append((prompt, made, events, steps))
            engine.submit([made])
            time.sleep(0.002 * (i % 3))
        for i, (prompt, made, events, steps) in enumerate(asked):
            told, end = heard(events)
            options = {"max_new_tokens": made.most, "stop": i % 11, "steps": steps}
            (wanted,) = model.generate([prompt], **options)
            assert [token.number for token in told] == wanted
            assert end == Finished("length" if len(wanted) == made.most else "stop")
    finally:
        engine.stop()
    assert not engine.thread.is_alive()


@pytest.mark.parametrize("own", [{}, {"past": "settled", "prelude": 1}])
def test_energies_logprobs_and_the_prompt(own):
    model = randomised(config(**own)).float()
    group = Group(model, Way(3, energies=True))
    made, events = job([1, 2, 3], 5, group.way, logprobs=2, echo=True)
    group.arriving.append(made)
    while not made.is_over:
        group.step()
    told, _ = heard(events)
    text = [token.number for token in told]
    assert text[:3] == [1, 2, 3]
    idx = torch.tensor([text])
    start, *_, x = model.states(idx)
    for name, energy in model.energies(x, start=start).items():
        found = torch.tensor([token.energies[name] for token in told])
        torch.testing.assert_close(found, energy[0].detach(), rtol=1e-4, atol=1e-4)
    logprobs = model.readout(x)[0].log_softmax(-1)
    for place in range(1, len(text)):
        wanted = logprobs[place - 1, text[place]].item()
        assert told[place].logprob == pytest.approx(wanted, abs=1e-4)
        best = logprobs[place - 1].topk(2)
        assert [number for number, _ in told[place].top] == best.indices.tolist()
    assert told[0].logprob is None


def test_adaptive_texts_are_those_of_stream_adaptive():
    model, stop = randomised(config(steps=6), std=0.1).float(), Stop("kl", 1e-3)
    group = Group(model, Way(6, stop))
    made, events = job([1, 2, 3], 8, group.way)
    group.arriving.append(made)
    while not made.is_over:
        group.step()
    told, _ = heard(events)
    wanted = list(stream_adaptive(model, [[1, 2, 3]], stop, max_new_tokens=9))
    assert [token.number for token in told] == [tokens[0] for tokens, _ in wanted[:8]]
    # What the token before it took: so one entry later.
    assert [token.steps for token in told] == [taken[0] for _, taken in wanted[1:9]]
    assert {token.steps for token in told} != {6}


def test_samples_depend_on_their_own_seed_alone():
    model = randomised(config()).float()
    sampling = Sampling(repetition_penalty=1.2, temperature=1.0, top_k=8, top_p=0.95)

    def sampled(company):
        group = Group(model, Way(3))
        made, events = job([1, 2], 20, group.way, sampling=sampling, seed=5)
        others = [job([3], 9, group.way, sampling=sampling, seed=i)[0] for i in range(company)]
        group.arriving += [*others, made]
        while not made.is_over:
            group.step()
        return [token.number for token in heard(events)[0]]

    assert sampled(0) == sampled(4)
    # In distribution, what torch.multinomial gives.
    first = []
    for seed in range(400):
        group = Group(model, Way(3))
        made, events = job([1, 2], 1, group.way, sampling=Sampling(temperature=1.0), seed=seed)
        group.arriving.append(made)
        group.step()
        first.append(heard(events)[0][0].number)
    logits, _ = model(torch.tensor([[1, 2]]))
    wanted = logits[0, -1].softmax(-1)
    found = torch.bincount(torch.tensor(first), minlength=11) / 400
    assert (found - wanted).abs().max() < 0.1


def test_the_memory_of_those_who_left_is_used_again():
    model = randomised(config()).float()
    group = Group(model, Way(3))
    for _ in range(20):
        made, events = zip(*(job([i], 2 + i, group.way) for i in range(4)), strict=True)
        group.arriving += made
        while group.jobs or group.arriving:
            group.step()
        assert all(isinstance(heard(e)[1], Finished) for e in events)
        assert group.slots.lengths == []
    assert group.slots.rows == 4


def test_cancelled_late_and_failing_texts_end(monkeypatch):
    model = randomised(config()).float()
    engine = Engine(model, rows=2, waiting=3).start()
    try:
        endless, _ = job([1], 10**9, Way(3))
        late, late_events = job([1], 10**9, Way(3), deadline=time.monotonic() + 0.2)
        engine.submit([endless, late])
        waiting, waiting_events = job([2], 1, Way(3))
        engine.submit([waiting])
        assert heard(late_events)[1] == Failed("the time for this request is over", 504)
        assert heard(waiting_events)[1] == Finished("length")
        with pytest.raises(BufferError):
            engine.submit([job([1], 1, Way(3))[0] for _ in range(4)])
        engine.cancel([endless])
        wait_for(lambda: engine.running == 0, what="the end of what was cancelled")
        monkeypatch.setattr(Group, "go_on", lambda self: 1 / 0)
        made, events = job([1], 9, Way(3))
        engine.submit([made])
        assert heard(events)[1].status == 500
        monkeypatch.undo()
        made, events = job([1], 9, Way(3))
        engine.submit([made])
        assert heard(events)[1] == Finished("length")
        made, events = job([1], 10**9, Way(3))
        engine.submit([made])
        threading.Timer(0.1, engine.stop).start()
        assert heard(events)[1].status == 503
        with pytest.raises(RuntimeError):
            engine.submit([made])
    finally:
        engine.stop()


def test_the_model_of_the_zoo():
    model = nrgpt.load("zoo:shakespeare_certified", device="cpu")
    group = Group(model.model, Way(8))
    made, events = job(model.encode("ROMEO:"), 30, group.way)
    group.arriving.append(made)
    while not made.is_over:
        group.step()
    text = model.decode([token.number for token in heard(events)[0]])
    assert text == model.generate("ROMEO:", max_new_tokens=30, temperature=0)


def test_logits_that_are_not_finite_are_said_instead_of_token_0(model):
    """And only of the texts that have them."""
    with torch.no_grad():
        model.tokens[7] = float("nan")
    engine = Engine(model, rows=4).start()
    try:
        for options in ({}, {"sampling": Sampling(temperature=1.0)}, {"logprobs": 2}):
            made, events = job([7, 7], 3, Way(2), **options)
            engine.submit([made])
            told, end = heard(events)
            assert told == []
            assert end.status == 500
            assert "logits are not finite" in end.message
    finally:
        engine.stop()


def test_stopping_early_says_it_too():
    model = randomised(config()).float()
    with torch.no_grad():
        model.final_norm.gamma.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits are not finite"):
        list(stream_adaptive(model, [[1, 2]], Stop("kl", 1e-2), max_new_tokens=2))
