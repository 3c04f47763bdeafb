"""What is needed to continue texts, apart from the choice of a token.

Past the context. Positions are learned and absolute, so a window cannot slide without computing
everything in it anew. It jumps: a text that has outgrown the context is seen from its last three
quarters of a context on, until it has outgrown it again. Cached or not, the rule is the same.
"""

from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..kernels.graph import Graphed
from ..model.block import stacked
from ..model.energy.total import Extra
from ..model.network import LanguageModel
from .cache import Cache

CacheKind = Literal["exact", "frozen", "none"]


def make_decoder(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    kind: CacheKind,
    steps: int | None,
    extra: Extra | None,
) -> "Decoder":
    """The recorded one on a GPU, if there is a cache and nothing of the user's that might wait."""
    if model.tokens.is_cuda and kind != "none" and not extra:
        return GraphedDecoder(model, prompts, kind, steps)
    return Decoder(model, prompts, kind, steps, extra)


class Decoder:
    """Texts that grow, the part of each that the model sees, and the cache of that part."""

    lead = 0
    """How many tokens are made before the first of them is read."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        kind: CacheKind,
        steps: int | None,
        extra: Extra | None,
    ):
        self.model, self.kind, self.steps, self.extra = model, kind, steps, extra
        with torch.no_grad():
            self.prepared = model.prepare(extra)
        self.device = model.tokens.device
        self.texts = [list(prompt) for prompt in prompts]
        self.starts = [max(0, len(text) - model.cfg.context) for text in self.texts]
        self.latest = torch.tensor([text[-1] for text in self.texts], device=self.device)
        self.cache: Cache | None = None

    def next_logits(self) -> Tensor:
        """Logits after the last token of each text, shape (rows, vocabulary)."""
        if max(self.lengths()) > self.model.cfg.context:
            self.jump()
        if self.cache is None:
            return self.whole_windows()
        x = self.extend(self.latest[:, None], self.cache)
        self.cache.end(1)
        return self.model.readout(x[:, 0]).float()

    def lengths(self) -> list[int]:
        """Tokens of each text that the model sees, or would see."""
        return [len(text) - start for text, start in zip(self.texts, self.starts, strict=True)]

    def jump(self) -> None:
        """Let go of the oldest quarter of what has outgrown the context."""
        context = self.model.cfg.context
        kept = context - context // 4
        self.starts = [
            len(text) - kept if length > context else start
            for text, length, start in zip(self.texts, self.lengths(), self.starts, strict=True)
        ]
        self.cache = None  # positions have changed

    def extend(self, idx: Tensor, cache: Cache) -> Tensor:
        """The last states of new tokens."""
        return self.model.extend(idx, cache, self.prepared, steps=self.steps)

    def whole_windows(self) -> Tensor:
        """Compute all that is seen, left-aligned: what follows a token cannot change it."""
        windows = [text[start:] for text, start in zip(self.texts, self.starts, strict=True)]
        lengths = [len(window) for window in windows]
        longest = max(lengths)
        padded = [window + [0] * (longest - len(window)) for window in windows]
        idx = torch.tensor(padded, device=self.device)
        last = torch.tensor(lengths, device=self.device) - 1
        rows = torch.arange(len(windows), device=self.device)
        if self.kind == "none":
            logits, _ = self.model(idx, steps=self.steps, extra=self.extra)
            return logits[rows, last].float()
        if self.cache is None:
            self.cache = Cache(self.model.cfg.context, frozen=self.kind == "frozen")
        x = self.model.extend(idx, self.cache, self.prepared, steps=self.steps)
        self.cache.end(lengths)
        return self.model.readout(x[rows, last]).float()

    def feed(self, chosen: Tensor) -> None:
        """The next token of each text, (rows,)."""
        self.latest = chosen
        for text, token in zip(self.texts, chosen.tolist(), strict=True):
            text.append(token)

    def read(self) -> list[int]:
        """The tokens that were fed last or, after ``lead`` more, those before them."""
        return [text[-1] for text in self.texts]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.starts = [self.starts[row] for row in rows]
        self.latest = self.latest[list(rows)]
        if self.cache is not None:
            self.cache.keep_rows(rows)

    def said(self) -> Tensor:
        """Which tokens each text has, shape (rows, vocabulary)."""
        said = torch.zeros(
            len(self.texts), self.model.cfg.vocab_size, dtype=torch.bool, device=self.device
        )
        for row, text in zip(said, self.texts, strict=True):
            row[torch.tensor(text, device=self.device)] = True
        return said


class GraphedDecoder(Decoder):
    """For a GPU: one token's computation is recorded once and replayed.

    Chosen tokens stay on the device, and the host reads each while the next one is being made. A
    text that has stopped goes on unread until all have.
    """

    lead = 1

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        kind: CacheKind,
        steps: int | None,
    ):
        super().__init__(model, prompts, kind, steps, None)
        if model.cfg.block == "nrgpt":
            with torch.no_grad():
                self.prepared = [stacked(terms) for terms in self.prepared]
        self.step = Graphed(self.logits_at, passing=True)
        self.positions: Tensor | None = None
        """Of the latest tokens, (rows, 1), on the device."""
        self.unread: deque[Tensor] = deque()
        self.made: deque[list[int]] = deque()

    def next_logits(self) -> Tensor:
        if self.cache is None:
            return self.whole_windows()
        if max(self.lengths()) + len(self.unread) > self.model.cfg.context:
            self.settle()
            cache = self.cache
            self.jump()
            cache.restart()  # the recording writes into its memory
            self.cache = cache
            return self.whole_windows()
        assert self.positions is not None
        self.positions += 1
        return self.step(self.latest[:, None], self.positions)

    def whole_windows(self) -> Tensor:
        self.positions = torch.tensor(self.lengths(), device=self.device)[:, None] - 1
        return super().whole_windows()

    def logits_at(self, idx: Tensor, positions: Tensor) -> Tensor:
        assert self.cache is not None
        x = self.model.extend(idx, self.cache, self.prepared, steps=self.steps, positions=positions)
        return self.model.readout(x[:, 0]).float()

    def feed(self, chosen: Tensor) -> None:
        self.latest = chosen
        self.unread.append(chosen)

    def read(self) -> list[int]:
        if not self.made:
            self.settle(1)
        return self.made.popleft()

    def settle(self, number: int | None = None) -> None:
        """Let the texts have what has been fed."""
        for _ in range(len(self.unread) if number is None else number):
            tokens = self.unread.popleft().tolist()
            self.made.append(tokens)
            for text, token in zip(self.texts, tokens, strict=True):
                text.append(token)
