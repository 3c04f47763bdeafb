"""Texts that are continued together: a thread that computes one token of each at a time.

A new text is read as soon as there is room for it (its prompt in one go, with those of others that
came at the same time) and from then on moves with the rest; one that ends makes room at once.
Texts that want different numbers of inference steps form groups, which take turns.

Whatever happens, every job hears how it ended: ``Finished`` or ``Failed`` is the last thing that
its ``send`` is called with.
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..decode.cache import Cache
from ..decode.decoder import Decoder, kept_of
from ..decode.generate import NOT_FINITE, Sampling
from ..dynamics.adaptive import AdaptiveDecoder
from ..dynamics.relax import Stop
from ..language_model import LanguageModel
from .slots import Slots

log = logging.getLogger(__name__)
MOST_READ_AT_ONCE = 16
"""Prompts read together: more would let the texts that are under way wait."""


class Way(NamedTuple):
    """How a text is computed. Texts of one way are computed together."""

    steps: int
    stop: Stop | None = None
    """Stop each token early by this rule."""
    energies: bool = False


class Token(NamedTuple):
    number: int
    logprob: float | None = None
    """Of this token, after the text before it; None for the first one of a text."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens there, and their logprobs."""
    energies: dict[str, float] | None = None
    """In its last state."""
    steps: int | None = None
    """How many it took, if it could stop early."""


class Finished(NamedTuple):
    reason: str
    """stop or length."""


class Failed(NamedTuple):
    message: str
    status: int


Event = Token | Finished | Failed


@dataclass(eq=False)
class Job:
    """A text to continue. ``send`` is called in the engine's thread, and must not block."""

    text: list[int]
    most: int
    """New tokens."""
    way: Way
    sampling: Sampling
    send: Callable[[Event], None]
    seed: int | None = None
    ends: frozenset[int] = frozenset()
    logprobs: int | None = None
    """How many of the likeliest tokens to report; None: not even the logprob of the chosen one."""
    echo: bool = False
    """Report the tokens of the prompt too."""
    deadline: float = float("inf")
    """By time.monotonic."""

    prompt: int = field(init=False)
    """Tokens of the prompt."""
    start: int = 0
    """Where the part of the text begins that the model sees."""
    held: Token | None = None
    """Chosen, and told to nobody yet: its energy is known once it has been computed."""
    is_over: bool = False
    is_cancelled: bool = False
    dice: random.Random = field(init=False)
    said: Tensor | None = None

    def __post_init__(self) -> None:
        self.prompt = len(self.text)
        self.dice = random.Random(self.seed)

    @property
    def waits_for_details(self) -> bool:
        return self.way.energies or self.way.stop is not None

    def end(self, event: Finished | Failed) -> None:
        if not self.is_over:
            self.is_over = True
            self.send(event)


class Group:
    """The texts of one way."""

    def __init__(self, model: LanguageModel, way: Way):
        self.model, self.way = model, way
        self.decoder = (
            Decoder(model, [[0]], "exact", way.steps)
            if way.stop is None
            else AdaptiveDecoder(model, [[0]], way.stop, way.steps)
        )
        self.slots = Slots(model.cfg.context)
        self.jobs: list[Job] = []
        """One for each row of the cache."""
        self.arriving: list[Job] = []

    def __len__(self) -> int:
        return len(self.jobs) + len(self.arriving)

    def step(self) -> None:
        """One token for each text."""
        arriving = self.arriving[:MOST_READ_AT_ONCE]
        del self.arriving[:MOST_READ_AT_ONCE]
        if self.jobs:
            self.go_on()
        if arriving:
            self.read(arriving)

    def fail(self, message: str, status: int) -> None:
        for job in (*self.jobs, *self.arriving):
            job.end(Failed(message, status))
        self.jobs, self.arriving = [], []
        self.slots = Slots(self.model.cfg.context)

    def go_on(self) -> None:
        jobs, decoder = self.jobs, self.decoder
        device = decoder.device
        idx = torch.tensor([[job.text[-1]] for job in jobs], device=device)
        positions = self.slots.begin(len(jobs), 1, device)
        energies: dict[str, Tensor] = {}
        if self.way.energies:
            x, energies = self.extend_with_energies(idx, positions, self.slots)
        else:
            x = decoder.extend(idx, positions, self.slots)
        self.slots.end(1)
        taken = decoder.taken if isinstance(decoder, AdaptiveDecoder) else None
        self.tell_held(jobs, {name: e[:, 0].tolist() for name, e in energies.items()}, taken)
        self.choose(jobs, decoder.readout(x[:, 0]).float())
        self.let_go()

    def read(self, jobs: list[Job]) -> None:
        """Prompts, and texts that have outgrown the context, whose windows are computed again."""
        decoder, device = self.decoder, self.decoder.device
        windows = [job.text[job.start :] for job in jobs]
        lengths = [len(window) for window in windows]
        longest = max(lengths)
        idx = torch.tensor([w + [0] * (longest - len(w)) for w in windows], device=device)
        cache = Cache(self.model.cfg.context)
        positions = cache.begin(len(jobs), longest, device)
        energies: dict[str, Tensor] = {}
        if self.way.energies:
            x, energies = self.extend_with_energies(idx, positions, cache)
        else:
            x = Decoder.extend(decoder, idx, positions, cache)
        cache.end(lengths)
        rows = torch.arange(len(jobs), device=device)
        last = torch.tensor(lengths, device=device) - 1
        final = {name: e[rows, last].tolist() for name, e in energies.items()}
        self.tell_held(jobs, final, None)
        for row, job in enumerate(jobs):
            if job.echo and len(job.text) == job.prompt:
                of_row = {name: e[row].tolist() for name, e in energies.items()}
                self.tell_prompt(job, x[row, : lengths[row]], of_row)
        self.slots.admit(cache)
        self.jobs += jobs
        self.choose(jobs, decoder.readout(x[rows, last]).float())
        self.let_go()

    def extend_with_energies(
        self, idx: Tensor, positions: Tensor, cache: Cache
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Last states, and their energies by name, (rows, tokens). As in a whole text, other tokens
        are seen in their last states too, whose keys are kept as those of one more step."""
        plans, steps = self.decoder.plans, self.way.steps
        x, seen = plans.begin(self.model.embed_at(idx, positions), cache)
        for t in range(steps):
            x = plans.at(t).move(x, t, seen)
        plan: Any = plans.at(0)
        found = plan.energies(x, steps, seen)
        return x, {"total": torch.stack(list(found.values())).sum(0), **found}

    def tell_held(
        self, jobs: Sequence[Job], energies: dict[str, list[float]], taken: list[int] | None
    ) -> None:
        for row, job in enumerate(jobs):
            if job.held is not None:
                own = {name: values[row] for name, values in energies.items()} or None
                steps = None if taken is None else taken[row]
                token, job.held = job.held._replace(energies=own, steps=steps), None
                job.send(token)
                self.finish_if_over(job)

    def tell_prompt(self, job: Job, x: Tensor, energies: dict[str, list[float]]) -> None:
        logprobs: list[Any] = [(None, ())] * len(job.text)
        if job.logprobs is not None and len(job.text) > 1:
            logits = self.decoder.readout(x[:-1]).float()
            rest = torch.tensor(job.text[1:], device=logits.device)
            logprobs[1:] = zip(*logprobs_of(logits, rest, [job.logprobs] * len(rest)), strict=True)
        for place, (number, (logprob, top)) in enumerate(zip(job.text, logprobs, strict=True)):
            own = {name: values[place] for name, values in energies.items()} or None
            job.send(Token(number, logprob, top, own))

    def choose(self, jobs: Sequence[Job], logits: Tensor) -> None:
        """The next token of each text that goes on."""
        is_sound = logits.isfinite().all(-1).tolist()
        for job, sound in zip(jobs, is_sound, strict=True):
            if not sound:
                job.end(Failed(NOT_FINITE, 500))
            elif job.most == 0:  # its prompt was all that it wanted
                job.end(Finished("length"))
        rows = [row for row, job in enumerate(jobs) if not job.is_over]
        if not rows:
            return
        going = [jobs[row] for row in rows]
        logits = logits if len(rows) == len(jobs) else logits[rows]
        chosen = chosen_tokens(going, logits)
        tells: list[Any] = [(None, ())] * len(going)
        if any(job.logprobs is not None for job in going):
            tells = list(
                zip(*logprobs_of(logits, chosen, [j.logprobs for j in going]), strict=True)
            )
        for job, number, (logprob, top) in zip(going, chosen.tolist(), tells, strict=True):
            if number in job.ends:
                job.end(Finished("stop"))
                continue
            job.text.append(number)
            if job.said is not None:
                job.said[number] = True
            token = Token(number, logprob, top)
            if job.waits_for_details:
                job.held = token
            else:
                job.send(token)
                self.finish_if_over(job)

    def finish_if_over(self, job: Job) -> None:
        if len(job.text) - job.prompt >= job.most:
            job.end(Finished("length"))

    def let_go(self) -> None:
        """Of texts that are over, cancelled or late, and of those that have outgrown the context,
        which come again with a shorter window."""
        context, now = self.model.cfg.context, time.monotonic()
        for row in reversed(range(len(self.jobs))):
            job = self.jobs[row]
            if now > job.deadline:
                job.end(Failed("the time for this request is over", 504))
            outgrown = len(job.text) - job.start > context
            if not (job.is_over or job.is_cancelled or outgrown):
                continue
            self.slots.leave(row)
            last = self.jobs.pop()
            if row < len(self.jobs):
                self.jobs[row] = last
            if not (job.is_over or job.is_cancelled):
                job.start = len(job.text) - kept_of(context)
                self.arriving.append(job)


def chosen_tokens(jobs: Sequence[Job], logits: Tensor) -> Tensor:
    """Each job draws by a number of its own, so that its text does not depend on the others."""
    chosen = logits.argmax(-1)
    by_sampling: dict[Sampling, list[int]] = {}
    for row, job in enumerate(jobs):
        if job.sampling.temperature > 0 or job.sampling.repetition_penalty != 1:
            by_sampling.setdefault(job.sampling, []).append(row)
    for sampling, rows in by_sampling.items():
        said = None
        if sampling.repetition_penalty != 1:
            said = torch.stack([said_by(jobs[row], logits) for row in rows])
        some = logits[rows]
        if sampling.temperature == 0:
            chosen[rows] = sampling.choose(some, said, None)
            continue
        p = sampling.probabilities(some, said)
        p = p.cpu() if p.device.type == "mps" else p  # Apple's GPUs have no float64
        ends = p.double().cumsum(-1)
        drawn = torch.tensor([[jobs[row].dice.random()] for row in rows], dtype=torch.float64)
        places = torch.searchsorted(ends, drawn.to(ends.device) * ends[:, -1:], right=True)
        last = logits.shape[-1] - 1
        chosen[rows] = places[:, 0].clamp(max=last).to(chosen.device)
    return chosen


def said_by(job: Job, logits: Tensor) -> Tensor:
    """Which tokens a text holds."""
    if job.said is None:
        job.said = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        job.said[torch.tensor(job.text, device=logits.device)] = True
    return job.said


def logprobs_of(
    logits: Tensor, chosen: Tensor, numbers: Sequence[int | None]
) -> tuple[list[float], list[tuple[tuple[int, float], ...]]]:
    """Of each row's chosen token, and of its likeliest ones."""
    all_of_them = logits.log_softmax(-1)
    of_chosen = all_of_them.gather(1, chosen[:, None])[:, 0].tolist()
    most = max(number or 0 for number in numbers)
    if not most:
        return of_chosen, [()] * len(of_chosen)
    values, tokens = all_of_them.topk(min(most, logits.shape[-1]))
    pairs = zip(tokens.tolist(), values.tolist(), numbers, strict=True)
    return of_chosen, [tuple(zip(t, v, strict=True))[: n or 0] for t, v, n in pairs]


class Engine:
    """``start`` it, ``submit`` jobs from any thread, and ``stop`` it."""

    def __init__(self, model: LanguageModel, *, rows: int = 64, waiting: int = 256):
        self.model, self.rows, self.most_waiting = model.eval(), rows, waiting
        self.groups: dict[Way, Group] = {}
        self.queue: deque[Job] = deque()
        self.change = threading.Condition()
        self.is_stopping = False
        self.thread = threading.Thread(target=self.run, name="nrgpt engine", daemon=True)
        self.done = 0

    def start(self) -> "Engine":
        self.thread.start()
        return self

    def stop(self, seconds: float = 10) -> None:
        with self.change:
            self.is_stopping = True
            self.change.notify()
        self.thread.join(seconds)

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive() and not self.is_stopping

    def has_room_for(self, count: int) -> bool:
        return len(self.queue) + count <= self.most_waiting

    def submit(self, jobs: Sequence[Job]) -> None:
        """All of them, or none: the queue may be full."""
        with self.change:
            if self.is_stopping:
                raise RuntimeError("the server is stopping")
            if not self.has_room_for(len(jobs)):
                raise BufferError(f"{len(self.queue)} texts are waiting already")
            self.queue.extend(jobs)
            self.change.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Nobody waits for these any more."""
        for job in jobs:
            job.is_cancelled = True
        with self.change:
            self.queue = deque(job for job in self.queue if not job.is_cancelled)

    @property
    def running(self) -> int:
        return sum(map(len, list(self.groups.values())))

    def run(self) -> None:
        with torch.no_grad():
            while True:
                with self.change:
                    while not (self.queue or self.running or self.is_stopping):
                        self.change.wait(60)
                    if self.is_stopping:
                        break
                    self.admit()
                self.step()
        for group in self.groups.values():
            group.fail("the server is stopping", 503)
        for job in self.queue:
            job.end(Failed("the server is stopping", 503))

    def admit(self) -> None:
        """Jobs from the queue, as long as there is room."""
        room = self.rows - self.running
        now = time.monotonic()
        while self.queue and room > 0:
            job = self.queue.popleft()
            if job.is_cancelled:
                continue
            if now > job.deadline:
                job.end(Failed("the time for this request is over", 504))
                continue
            if job.way not in self.groups:
                self.groups[job.way] = Group(self.model, job.way)
            self.groups[job.way].arriving.append(job)
            room -= 1

    def step(self) -> None:
        for way, group in list(self.groups.items()):
            before = len(group)
            try:
                group.step()
            except Exception as error:  # whatever it was, others must not wait for ever
                log.exception("texts of %s failed", way)
                group.fail(f"the model failed: {error}", 500)
            self.done += before - len(group)
            if not len(group):
                self.forget(way)

    def forget(self, way: Way) -> None:
        """The group of the model's own steps keeps its memory for the next texts."""
        if way != Way(self.model.cfg.steps):
            del self.groups[way]
