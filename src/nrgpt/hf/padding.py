"""Move padding out of the way: real tokens to the left, and results back to where they belong.

On the left, positions count from 0. Later tokens cannot affect earlier ones, so the model does not
need to know about padding.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Aligned(NamedTuple):
    """Real tokens on the left. Without padding, ``real`` and ``column`` are None."""

    idx: Tensor  # (batch, as many tokens as the longest text has)
    real: Tensor | None = None  # which tokens of input_ids are not padding
    column: Tensor | None = None  # where each token of input_ids went

    def counts(self) -> list[int]:
        """Real tokens in each row; all of them where the text is not known yet."""
        if self.real is None or torch.compiler.is_compiling():
            return [self.idx.shape[1]] * self.idx.shape[0]
        return [int(count) for count in self.real.sum(1).tolist()]

    def back(self, values: Tensor, *, goes_on: bool = False) -> Tensor:
        """(batch, aligned tokens, ...) -> (batch, tokens, ...), 0 for padding; or, if the text
        ``goes_on``, what the last token before the padding has."""
        if self.real is None or self.column is None:
            return values
        shape = self.real.shape + (1,) * (values.dim() - 2)
        column = self.column.clamp(max=values.shape[1] - 1)
        if goes_on:
            column = self.real.cumsum(1).sub(1).clamp(min=0)
        column = column.view(shape).expand(-1, -1, *values.shape[2:])
        padding = ~self.real if not goes_on else self.real.cumsum(1) == 0
        return values.gather(1, column).masked_fill(padding.view(shape), 0)

    def back_both_ways(self, weights: Tensor) -> Tensor:
        """(batch, heads, tokens, tokens), as ``back``."""
        rows = self.back(weights.transpose(1, 2)).transpose(1, 2)
        return self.back(rows.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def align(input_ids: Tensor, attention_mask: Tensor | None) -> Aligned:
    """``attention_mask`` may also cover earlier tokens, in a cache."""
    real = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :].bool()
    is_compiling = torch.compiler.is_compiling()  # then what a mask holds must not decide anything
    if real is None or (not is_compiling and bool(real.all())):
        return Aligned(input_ids)
    order = (~real).int().argsort(dim=1, stable=True)  # real tokens first, in their order
    if is_compiling:
        idx = input_ids.masked_fill(~real, 0).gather(1, order)
        return Aligned(idx, real, order.argsort(dim=1))
    longest = max(1, int(real.sum(1).max()))
    # Padding may be any number, even one outside the vocabulary.
    idx = input_ids.masked_fill(~real, 0).gather(1, order)[:, :longest]
    return Aligned(idx, real, order.argsort(dim=1))
