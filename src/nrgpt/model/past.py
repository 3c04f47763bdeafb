"""What a token sees of the tokens before it.

A term is handed a ``Past`` and asks it for attention or for the logsumexp of scores. It cannot tell
whether the past is the rest of a whole text, computed at the same time, or keys that were kept; nor
whether these move from step to step or have settled.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.attention import attend, attend_with_logsumexp, logsumexp_scores

Shown = Tensor | tuple[Tensor, Tensor]
"""What a token shows to later ones: keys, or keys and values, each (batch, heads, tokens, size).
Keys alone are values too. All heads may share them: (batch, 1, tokens, size)."""


class Past(ABC):
    """The inference step ``t`` (None outside of a forward pass), and the keys of earlier tokens.

    ``strict`` lets token A see the tokens B < A, and otherwise itself too. A token that sees
    nothing gets zero.
    """

    def __init__(self, t: int | None, shown: Shown | None):
        self.t = t
        self.shown = shown

    @abstractmethod
    def at(self, t: int | None) -> "Past":
        """The same keys, seen at step t."""

    @property
    def own(self) -> Tensor:
        """The keys of the tokens that are being computed, which are their own."""
        keys = self.shown[0] if isinstance(self.shown, tuple) else self.shown
        assert keys is not None, "this term shows no keys: write keys()"
        return keys

    @abstractmethod
    def attend(self, q: Tensor, scale: float, *, strict: bool) -> Tensor:
        """sum_B softmax_B(scale q_A . k_B) v_B, shaped like q (batch, heads, tokens, size)."""

    @abstractmethod
    def logsumexp(self, q: Tensor, scale: float, *, strict: bool) -> Tensor:
        """log sum_B exp(scale q_A . k_B), shape (batch, heads, tokens)."""

    @abstractmethod
    def visible(self, *, strict: bool) -> tuple[Tensor, Tensor]:
        """All keys there are (batch, heads, keys, size), and which of them each token sees
        (batch or 1, 1, tokens, keys): for terms that do something else with them."""

    def attend_with_logsumexp(
        self, q: Tensor, scale: float, *, strict: bool
    ) -> tuple[Tensor, Tensor]:
        return self.attend(q, scale, strict=strict), self.logsumexp(q, scale, strict=strict)


class WholeText(Past):
    """All tokens of a text are computed together, and see one another where they are now."""

    def at(self, t: int | None) -> "WholeText":
        return WholeText(t, self.shown)

    def attend(self, q: Tensor, scale: float, *, strict: bool) -> Tensor:
        k, v = self.shown if isinstance(self.shown, tuple) else (self.own, None)
        return attend(q, k, scale, strict=strict, values=v)

    def logsumexp(self, q: Tensor, scale: float, *, strict: bool) -> Tensor:
        return logsumexp_scores(q, self.own, scale, strict=strict)

    def attend_with_logsumexp(
        self, q: Tensor, scale: float, *, strict: bool
    ) -> tuple[Tensor, Tensor]:
        if isinstance(self.shown, tuple):
            return super().attend_with_logsumexp(q, scale, strict=strict)
        return attend_with_logsumexp(q, self.own, scale, strict=strict)

    def visible(self, *, strict: bool) -> tuple[Tensor, Tensor]:
        keys = self.own
        there = torch.arange(keys.shape[2], device=keys.device)
        here = there[:, None]
        return keys, (there < here if strict else there <= here)[None, None]


class Memory(Protocol):
    """Where keys are kept, so that tokens can be computed without the earlier ones."""

    def past(self, t: int | None, slot: int, shown: Shown | None) -> Past:
        """What the tokens that are being computed see at step t. They show ``shown``; a block with
        several kinds of keys gives each a slot of its own. The layers of a prelude are the steps
        before 0; keys that all steps share have no step, None."""


class Still(Memory, Protocol):
    """What a settled past leaves to the steps."""

    def drive(self, slot: int) -> Tensor | None:
        """What drives the tokens, (batch, tokens, m): it is added to z."""


class Settled(NamedTuple):
    """Keys and drives that were made once and stand still, by slot."""

    pasts: list[Past]
    drives: list[Tensor | None]

    def past(self, t: int | None, slot: int, shown: Shown | None) -> Past:
        return self.pasts[slot].at(t)

    def drive(self, slot: int) -> Tensor | None:
        return self.drives[slot]
