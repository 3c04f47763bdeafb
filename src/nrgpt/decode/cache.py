"""What decoding keeps of the tokens so far, so that each new one is computed alone.

Token B at step t depends on nothing after it. So the keys that it shows to later tokens at step t
can be kept, one set for each step: the exact cache. With keys equal to values, that is all.

The frozen cache keeps one set only: the keys of each token's last state, 1/T of the memory. A new
token then moves in the field of a past at rest. That is what the descent theorem assumes, but it is
another model: one that was trained with all tokens moving together may say something else
altogether (docs/performance.md has numbers).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.dispatch import is_fused_without_gradient


class Cache:
    """Keys by step and slot, each (rows, heads, capacity, size); a slot is one kind of key.

    ``begin`` announces tokens, ``put`` keeps their keys, ``end`` says that they are all there.
    """

    def __init__(self, capacity: int, *, frozen: bool = False):
        self.capacity = capacity
        self.frozen = frozen
        self.lengths: list[int] = []
        """Tokens held, for each row."""
        self.kept: dict[tuple[int, int], Tensor] = {}
        self.seen: Seen | None = None
        self.is_even = False

    def begin(self, rows: int, tokens: int, device: torch.device) -> None:
        """The next ``tokens`` tokens of each row are about to be computed."""
        if not self.lengths:
            self.lengths = [0] * rows
        if rows != len(self.lengths):
            raise ValueError(f"idx has {rows} rows; this cache holds {len(self.lengths)}")
        if max(self.lengths) + tokens > self.capacity:
            raise ValueError(
                f"the cache holds {max(self.lengths)} tokens; {tokens} more do not fit into its "
                f"capacity of {self.capacity}"
            )
        self.seen = Seen.after(self.lengths, tokens, device)
        self.is_even = len(set(self.lengths)) == 1

    def begin_at(self, positions: Tensor) -> None:
        """As ``begin``, for one token in each row at ``positions`` (rows, 1), which stay unread:
        what follows is the same for all of them, so it can be recorded."""
        self.seen = Seen(positions, self.capacity)
        self.is_even = False

    def restart(self) -> None:
        """Forget all tokens, and keep the memory."""
        self.lengths = []

    @property
    def is_empty(self) -> bool:
        return not any(self.lengths)

    def positions(self) -> Tensor:
        """Of the announced tokens, (rows, tokens)."""
        assert self.seen is not None
        return self.seen.positions

    def put(self, t: int, slot: int, keys: Tensor) -> Tensor:
        """Keep the announced tokens' keys (rows, heads, tokens, size) of step t; returns those of
        all tokens, with places to spare."""
        assert self.seen is not None
        place = (0 if self.frozen else t, slot)
        if place not in self.kept:
            rows, heads, _, size = keys.shape
            self.kept[place] = keys.new_zeros(rows, heads, self.capacity, size)
        kept = self.kept[place]
        if self.is_even:
            first = self.lengths[0]
            kept[:, :, first : first + keys.shape[2]] = keys
        elif keys.shape[2] == 1 and keys.stride(-1) == 1 and is_fused_without_gradient(keys):
            from ..kernels.triton_decoding import keep_one

            keep_one(kept, keys, self.seen.positions)
        else:
            kept[self.seen.rows, :, self.seen.positions] = keys.transpose(1, 2)
        return kept

    def end(self, tokens: int | Sequence[int]) -> None:
        """The announced tokens are there: all of them or, row by row, as many as count (the rest
        was padding)."""
        counts = [tokens] * len(self.lengths) if isinstance(tokens, int) else tokens
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        self.seen = None

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forget the other rows."""
        self.lengths = [self.lengths[row] for row in rows]
        self.kept = {place: kept[list(rows)] for place, kept in self.kept.items()}


class Seen:
    """Which of the kept tokens each announced token may see."""

    def __init__(self, positions: Tensor, stop: int, *, single: bool = False):
        self.positions = positions
        """(rows, tokens), of the announced tokens."""
        self.stop = stop
        """No kept token matters from here on."""
        self.single = single
        """Every row has one new token, the last one, at the same place."""
        self.rows = torch.arange(len(positions), device=positions.device)[:, None]
        self.masks: dict[bool, Tensor] = {}

    @classmethod
    def after(cls, lengths: Sequence[int], tokens: int, device: torch.device) -> "Seen":
        """The next ``tokens`` tokens of rows of these lengths."""
        first = torch.tensor(lengths, device=device)[:, None]
        positions = first + torch.arange(tokens, device=device)
        is_even = len(set(lengths)) == 1
        return cls(positions, max(lengths) + tokens, single=is_even and tokens == 1)

    def window(self, kept: Tensor, *, strict: bool) -> tuple[Tensor, Tensor | None]:
        """The kept keys that matter, and a mask (rows, 1, tokens, keys) where not all are seen."""
        if self.single:
            return kept[:, :, : self.stop - 1 if strict else self.stop], None
        if strict not in self.masks:
            there = torch.arange(self.stop, device=kept.device)
            here = self.positions[:, None, :, None]
            self.masks[strict] = there < here if strict else there <= here
        return kept[:, :, : self.stop], self.masks[strict]
