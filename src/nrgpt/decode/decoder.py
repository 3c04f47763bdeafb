"""Texts that grow: the part of each that the model sees, and the cache of that part.

Positions are learned and absolute, so the window of a text that has outgrown the context cannot
slide: everything in it would have to be computed again at every token. Instead it jumps: the model
sees the last three quarters of a context (``kept_of``), until the text has outgrown it again. The
rule is the same with and without a cache.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..check import check
from ..kernels.graph import Graphed
from ..model.network import Network
from ..model.step import Extra
from .cache import Cache

CacheKind = Literal["exact", "frozen", "none"]


def kept_of(context: int) -> int:
    """How many tokens the model sees of a text that has just outgrown the context."""
    return context - context // 4


def make_decoder(
    model: Network,
    prompts: Sequence[Sequence[int]],
    kind: CacheKind = "exact",
    steps: int | None = None,
    extra: Extra | None = None,
) -> "Decoder":
    """The recorded one on a GPU, if there is a cache and no extra term, which might not be possible
    to record."""
    is_recorded = model.cfg.block not in ("et", "ebt") and kind != "none" and not extra
    if model.tokens.is_cuda and is_recorded:
        return GraphedDecoder(model, prompts, kind, steps)
    return Decoder(model, prompts, kind, steps, extra)


class Decoder:
    lead = 0
    """How many tokens are fed before the first of them is read."""

    def __init__(
        self,
        model: Network,
        prompts: Sequence[Sequence[int]],
        kind: CacheKind = "exact",
        steps: int | None = None,
        extra: Extra | None = None,
    ):
        if model.cfg.block == "et":
            raise ValueError(
                "block = 'et': its tokens see later ones, so it cannot continue texts. To complete "
                "one, put token vocab_size - 1 where a token is missing, and call the model"
            )
        if model.cfg.block == "ebt":
            check(kind != "frozen", "cache", kind, "'exact' or 'none' with block = 'ebt'")
            kind = "none"  # exact, and slow: every token computes the whole text
        self.model, self.kind, self.extra = model, kind, extra
        self.steps = model.check_steps(steps)
        if kind == "frozen" and model.cfg.block == "gpt":
            raise ValueError(
                "cache = 'frozen': must be 'exact' or 'none' for a gpt, whose blocks differ from "
                "step to step"
            )
        if kind == "frozen" and model.is_settled:
            raise ValueError(
                "cache = 'frozen': must be 'exact' or 'none' with past = 'settled', whose exact "
                "cache has one set of keys for all steps anyway"
            )
        if kind == "frozen" and model.cfg.block == "nrgpt" and model.cfg.prelude:
            raise ValueError(
                f"cache = 'frozen': must be 'exact' or 'none' with prelude = {model.cfg.prelude}, "
                "whose layers show keys of their own"
            )
        with torch.no_grad():
            self.plans, self.readout = model.plan(extra, stacked=True), model.reader()
        self.device = model.tokens.device
        self.texts = [list(prompt) for prompt in prompts]
        self.starts = [max(0, len(text) - model.cfg.context) for text in self.texts]
        """Where the part of each text begins that the model sees."""
        self.longest = max(self.lengths())
        """Of these parts; it grows with every token, until the window jumps."""
        self.latest = torch.tensor([text[-1] for text in self.texts], device=self.device)
        self.cache: Cache | None = None

    def lengths(self) -> list[int]:
        """How many tokens of each text the model sees."""
        return [len(text) - start for text, start in zip(self.texts, self.starts, strict=True)]

    def next_logits(self) -> Tensor:
        """Logits after the last token of each text, shape (rows, vocabulary)."""
        if self.longest > self.model.cfg.context:
            self.jump()
            self.cache = None
        if self.cache is None:
            return self.whole_windows()
        idx = self.latest[:, None]
        positions = self.cache.begin(len(idx), 1, self.device)
        x = self.extend(idx, positions, self.cache)
        self.cache.end(1)
        return self.readout(x[:, 0]).float()

    def extend(self, idx: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """The last states of new tokens."""
        x = self.model.extend(idx, positions, self.plans, cache, steps=self.steps)
        if cache.frozen:
            self.plans.at(0).keep(x, 0, cache)
        return x

    def jump(self) -> None:
        """Drop the oldest quarter of the texts that have outgrown the context."""
        context = self.model.cfg.context
        for row, length in enumerate(self.lengths()):
            if length > context:
                self.starts[row] += length - kept_of(context)
        self.longest = max(self.lengths())

    def whole_windows(self) -> Tensor:
        """Compute all that is seen, left-aligned: padding after a token cannot change it."""
        lengths = self.lengths()
        windows = [text[start:] for text, start in zip(self.texts, self.starts, strict=True)]
        padded = [window + [0] * (self.longest - len(window)) for window in windows]
        idx = torch.tensor(padded, device=self.device)
        last = torch.tensor(lengths, device=self.device) - 1
        rows = torch.arange(len(windows), device=self.device)
        if self.kind == "none":
            logits, _ = self.model(idx, steps=self.steps, extra=self.extra, dropout=False)
            assert logits is not None
            return logits[rows, last].float()
        if self.cache is None:
            self.cache = Cache(self.model.cfg.context, frozen=self.kind == "frozen")
        positions = self.cache.begin(len(idx), self.longest, self.device)
        x = Decoder.extend(self, idx, positions, self.cache)
        self.cache.end(lengths)
        return self.readout(x[rows, last]).float()

    def feed(self, chosen: Tensor) -> None:
        """Append a token to each text, (rows,)."""
        self.latest = chosen
        self.longest += 1
        for text, token in zip(self.texts, chosen.tolist(), strict=True):
            text.append(token)

    def read(self) -> list[int]:
        """The tokens that were fed last, or ``lead`` before that."""
        return [text[-1] for text in self.texts]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.starts = [self.starts[row] for row in rows]
        self.longest = max(self.lengths())
        self.latest = self.latest[list(rows)]
        if self.cache is not None:
            self.cache.keep_rows(rows)

    def said(self) -> Tensor:
        """Which tokens each text holds, shape (rows, vocabulary)."""
        said = torch.zeros(len(self.texts), self.model.cfg.vocab_size, dtype=torch.bool)
        for row, text in zip(said, self.texts, strict=True):
            row[torch.tensor(text)] = True
        return said.to(self.device)


class GraphedDecoder(Decoder):
    """For a GPU: the computation of one token is recorded once and replayed.

    Chosen tokens stay on the device, and the host reads each while the next one is being made. So a
    text that has stopped grows until all have stopped, without being read.
    """

    lead = 1

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.step = Graphed(self.logits_at, passing=True)
        self.positions: Tensor | None = None
        """Of the latest tokens, (rows, 1), on the device."""
        self.unread: deque[Tensor] = deque()
        self.made: deque[list[int]] = deque()

    def next_logits(self) -> Tensor:
        if self.cache is None:
            return self.whole_windows()
        if self.longest > self.model.cfg.context:
            self.settle()
            self.jump()
            self.cache.lengths = []  # its memory stays, since the recorded graph writes there
            return self.whole_windows()
        assert self.positions is not None
        self.positions += 1
        return self.step(self.latest[:, None], self.positions)

    def whole_windows(self) -> Tensor:
        self.positions = torch.tensor(self.lengths(), device=self.device)[:, None] - 1
        return super().whole_windows()

    def logits_at(self, idx: Tensor, positions: Tensor) -> Tensor:
        assert self.cache is not None
        self.cache.begin_at(positions)
        x = self.extend(idx, positions, self.cache)
        return self.readout(x[:, 0]).float()

    def feed(self, chosen: Tensor) -> None:
        self.latest = chosen
        self.longest += 1
        self.unread.append(chosen)

    def read(self) -> list[int]:
        if not self.made:
            self.settle(1)
        return self.made.popleft()

    def settle(self, number: int | None = None) -> None:
        """Append the first ``number`` tokens that were fed, or all, to the texts."""
        for _ in range(len(self.unread) if number is None else number):
            tokens = self.unread.popleft().tolist()
            self.made.append(tokens)
            for text, token in zip(self.texts, tokens, strict=True):
                text.append(token)
