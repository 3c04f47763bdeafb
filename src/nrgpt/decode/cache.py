"""The keys of the tokens so far, kept so that each new token is computed alone.

Token B at step t depends on nothing after it, so the keys that it shows to later tokens at step t
can be kept, one set for each step: the exact cache. With keys equal to values, that is all.

The frozen cache keeps only the keys of each token's last state, 1/T of the memory. A new token then
moves in the field of a past at rest. This is what the descent theorem assumes, but it is another
model: one that was trained with all tokens moving together may say something else altogether
(docs/performance.md has numbers).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention import logsumexp_among
from ..kernels.dispatch import choose
from ..model.past import Past, Shown, WholeText

Room = tuple[Tensor, ...]
"""Memory for keys, or for keys and values: each (rows, heads, places, size)."""


class Seen:
    """Which of the kept tokens each new token sees."""

    def __init__(self, positions: Tensor, stop: int, *, single: bool = False):
        self.positions = positions
        """Of the new tokens, (rows, tokens)."""
        self.stop = stop
        """Places from here on are not looked at."""
        self.single = single
        """Every row has one new token, and all of them have the same position."""
        self.masks: dict[bool, Tensor] = {}

    def mask(self, *, strict: bool) -> Tensor:
        """(rows, 1, tokens, keys)"""
        if strict not in self.masks:
            there = torch.arange(self.stop, device=self.positions.device)
            here = self.positions[:, None, :, None]
            self.masks[strict] = there < here if strict else there <= here
        return self.masks[strict]


class Kept(Past):
    """New tokens among kept keys."""

    def __init__(self, t: int | None, shown: Shown | None, kept: Room, seen: Seen):
        self.t, self.shown, self.seen = t, shown, seen
        self.keys, self.values = kept[0], kept[-1]

    def at(self, t: int | None) -> "Kept":
        return Kept(t, self.shown, (self.keys, self.values), self.seen)

    def attend(self, q: Tensor, scale: float, *, strict: bool) -> Tensor:
        seen = self.seen
        if q.is_cuda and q.shape[2] == 1 and self.values is self.keys and is_fused(q):
            from ..kernels.triton_decoding import attend_one

            return attend_one(q, self.keys, seen.positions, scale, strict=strict)
        stop = seen.stop - 1 if seen.single and strict else seen.stop
        k = self.keys[:, :, :stop].expand(-1, q.shape[1], -1, -1)
        v = self.values[:, :, :stop].expand(-1, q.shape[1], -1, -1)
        if seen.single:
            return F.scaled_dot_product_attention(q, k, v, scale=scale)
        mask = seen.mask(strict=strict)
        if not strict:  # every token sees itself at least
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        blind = ~mask.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | blind, scale=scale)
        return out.masked_fill(blind, 0)

    def logsumexp(self, q: Tensor, scale: float, *, strict: bool) -> Tensor:
        keys, mask = self.visible(strict=strict)
        return logsumexp_among(q, keys, scale, mask)

    def visible(self, *, strict: bool) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, : self.seen.stop], self.seen.mask(strict=strict)


class Cache:
    """Keys by step and slot; a slot is one kind of key.

    ``begin`` announces new tokens, ``past`` keeps their keys, and ``end`` counts them.
    """

    def __init__(self, capacity: int, *, frozen: bool = False):
        self.capacity = capacity
        self.frozen = frozen
        self.lengths: list[int] = []
        """Tokens held, for each row."""
        self.kept: dict[tuple[int | None, int], Room] = {}
        self.seen: Seen | None = None
        self.is_even = False

    def begin(self, rows: int, tokens: int, device: torch.device) -> Tensor:
        """Announce the next ``tokens`` tokens of each row; returns their positions."""
        lengths = self.lengths = self.lengths or [0] * rows
        if rows != len(lengths):
            raise ValueError(f"idx has {rows} rows; this cache holds {len(lengths)}")
        longest = max(lengths)
        if longest + tokens > self.capacity:
            raise ValueError(
                f"the cache holds {longest} tokens; {tokens} more do not fit into its capacity of "
                f"{self.capacity}"
            )
        self.is_even = min(lengths) == longest
        first = torch.tensor(lengths, device=device)[:, None]
        positions = first if tokens == 1 else first + torch.arange(tokens, device=device)
        self.seen = Seen(positions, longest + tokens, single=self.is_even and tokens == 1)
        return positions

    def begin_at(self, positions: Tensor) -> None:
        """As ``begin``, for one token in each row at ``positions`` (rows, 1). Their values are
        never read here, so that one recorded CUDA graph serves all positions."""
        self.seen = Seen(positions, self.capacity)
        self.is_even = False

    def end(self, tokens: int | Sequence[int]) -> None:
        """The announced tokens are in the cache. ``tokens`` says how many, for all rows or for
        each; the rest was padding."""
        counts = [tokens] * len(self.lengths) if isinstance(tokens, int) else tokens
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]

    def past(self, t: int | None, slot: int, shown: Shown | None) -> Past:
        """Keep what the announced tokens show; they see one another too."""
        if shown is None:
            return WholeText(t, None)
        assert self.seen is not None
        place = (0 if self.frozen else t, slot)
        if place not in self.kept:
            self.kept[place] = make_room(shown, self.capacity)
        kept = self.kept[place]
        news = shown if isinstance(shown, tuple) else (shown,)
        for old, new in zip(kept, news, strict=True):
            if self.is_even:
                first = self.lengths[0]
                old[:, :, first : first + new.shape[2]] = new
            else:
                put(old, new, self.seen.positions)
        if not any(self.lengths):  # no earlier tokens: the new ones are the whole text
            return WholeText(t, shown)
        return Kept(t, shown, kept, self.seen)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forget the other rows."""
        chosen = list(rows)
        self.lengths = [self.lengths[row] for row in chosen]
        self.kept = {place: tuple(k[chosen] for k in kept) for place, kept in self.kept.items()}


def make_room(shown: Shown, capacity: int) -> Room:
    """Zeros for ``capacity`` tokens that show what these do."""
    both = shown if isinstance(shown, tuple) else (shown,)
    return tuple(x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in both)


def put(kept: Tensor, keys: Tensor, positions: Tensor) -> None:
    """Write keys (rows, heads, tokens, size) into kept ones, at positions (rows, tokens)."""
    if keys.is_cuda and keys.shape[2] == 1 and keys.stride(-1) == 1 and is_fused(keys):
        from ..kernels.triton_decoding import keep_one

        keep_one(kept, keys, positions)
        return
    rows = torch.arange(len(positions), device=positions.device)[:, None]
    kept[rows, :, positions] = keys.transpose(1, 2)


def is_fused(tensor: Tensor) -> bool:
    """Whether to take a kernel that has no backward pass."""
    return not tensor.requires_grad and choose(tensor).fused
