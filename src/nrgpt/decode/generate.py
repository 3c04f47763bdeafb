"""Continue texts: prompts of unequal length, greedy or sampled, all at once or token by token."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from ..check import check, check_choice
from ..model.network import Network
from ..model.step import Extra
from .decoder import CacheKind, Decoder, make_decoder


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from the logits. The options apply in this order."""

    repetition_penalty: float = 1.0
    """Logits of tokens already in the text are divided by this (multiplied, if negative)."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int | None = None
    """Keep only the k likeliest."""
    top_p: float | None = None
    """Keep only the likeliest that together have at least this probability."""

    def __post_init__(self) -> None:
        heat, penalty = self.temperature, self.repetition_penalty
        check(0 <= heat < float("inf"), "temperature", heat, "at least 0 (greedy) and finite")
        check(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "at least 1, or None")
        is_share = self.top_p is None or 0 < self.top_p <= 1
        check(is_share, "top_p", self.top_p, "in (0, 1], or None")
        check(0 < penalty < float("inf"), "repetition_penalty", penalty, "positive and finite")

    def choose(
        self, logits: Tensor, said: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """A token for each row of logits. ``said`` marks the tokens that a row's text holds."""
        if self.temperature == 0:
            return self.penalised(logits, said).argmax(-1)
        probabilities = self.probabilities(logits, said)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)

    def penalised(self, logits: Tensor, said: Tensor | None) -> Tensor:
        if said is None:
            return logits
        penalty = self.repetition_penalty
        weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(said, weaker, logits)

    def probabilities(self, logits: Tensor, said: Tensor | None) -> Tensor:
        """Of each token, at a temperature above 0."""
        logits = self.penalised(logits, said)
        # The largest becomes 0: divided by a tiny temperature, it would be infinite.
        heat = max(self.temperature, torch.finfo(logits.dtype).tiny)
        logits = (logits - logits.amax(-1, keepdim=True)) / heat
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probabilities = logits.softmax(-1)
        if self.top_p is not None:
            ordered, order = probabilities.sort(descending=True)
            likelier = ordered.cumsum(-1) - ordered  # the probability of all before this one
            dropped = torch.empty_like(likelier, dtype=torch.bool)
            dropped.scatter_(-1, order, (likelier >= self.top_p) & (likelier > 0))
            probabilities = probabilities.masked_fill(dropped, 0)
        return probabilities


def generate(
    model: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: int | Collection[int] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    generator: torch.Generator | None = None,
    steps: int | None = None,
    cache: CacheKind = "exact",
    extra: Extra | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt: ``max_new_tokens``, or those before a token of ``stop``.

    ``cache`` "exact" gives what "none" gives, but faster; "frozen" is another model (see
    nrgpt.decode.cache). On a GPU a row that has stopped still draws samples until all have, so with
    ``stop`` samples differ from those of a CPU, though not in distribution. ``extra`` terms are
    added to the energy. ``generator`` must be on the model's device.
    """
    sampling = Sampling(repetition_penalty, temperature, top_k, top_p)
    new: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        stop=stop,
        sampling=sampling,
        generator=generator,
        steps=steps,
        cache=cache,
        extra=extra,
    ):
        for row, token in tokens.items():
            new[row].append(token)
    return new


def stream(
    model: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: int | Collection[int] | None = None,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    steps: int | None = None,
    cache: CacheKind = "exact",
    extra: Extra | None = None,
) -> Iterator[dict[int, int]]:
    """``generate`` token by token: the new token of each row that has not stopped."""
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("every prompt must hold at least one token")
    check(max_new_tokens >= 0, "max_new_tokens", max_new_tokens, "at least 0")
    check_choice("cache", cache, get_args(CacheKind))
    # A GPU would not report it.
    model.check_vocabulary(torch.tensor([token for prompt in prompts for token in prompt]))
    stops = {stop} if isinstance(stop, int) else set(stop or ())
    decoder = make_decoder(model, prompts, cache, steps, extra)
    return run(decoder, max_new_tokens, stops, sampling or Sampling(), generator)


NOT_FINITE = (
    "the model's logits are not finite, so no token is the likeliest: its weights are damaged, or "
    "it diverged in training"
)


def check_sound(is_sound: Tensor) -> None:
    if not is_sound:
        raise ValueError(NOT_FINITE)


def run(
    decoder: Decoder,
    max_new_tokens: int,
    stops: set[int],
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Iterator[dict[int, int]]:
    said = decoder.said() if sampling.repetition_penalty != 1 else None
    rows = list(range(len(decoder.texts)))
    running = set(rows)
    is_sound = torch.ones((), dtype=torch.bool, device=decoder.device)
    for number in range(max_new_tokens + decoder.lead):
        if number < max_new_tokens:
            with torch.no_grad():
                logits = decoder.next_logits()
                is_sound = is_sound & logits.isfinite().all()
                if decoder.lead == 0:
                    check_sound(is_sound)
                else:  # looking would make the device wait for each token; drawing must not fail
                    logits = torch.where(is_sound, logits, 0)
                chosen = sampling.choose(logits, said, generator)
                if said is not None:
                    said.scatter_(1, chosen[:, None], True)
            decoder.feed(chosen)
        if number < decoder.lead:
            continue
        tokens = decoder.read()
        new = {row: token for row, token in zip(rows, tokens, strict=True) if row in running}
        running -= {row for row, token in new.items() if token in stops}
        yield {row: token for row, token in new.items() if row in running}
        if not running:
            break
        if len(running) < len(rows) and decoder.lead == 0:
            kept = [i for i, row in enumerate(rows) if row in running]
            rows = [rows[i] for i in kept]
            decoder.keep_rows(kept)
            said = None if said is None else said[kept]
    check_sound(is_sound)
