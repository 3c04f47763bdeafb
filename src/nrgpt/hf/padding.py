"""Move padding out of the way: real tokens to the left, and results back to where they belong.

On the left, positions count from 0. Later tokens cannot affect earlier ones, so the model does not
need to know about padding.
"""

from typing import NamedTuple

from torch import Tensor


class Aligned(NamedTuple):
    """Real tokens on the left. Without padding, ``real`` and ``column`` are None."""

    idx: Tensor  # (batch, as many tokens as the longest text has)
    counts: list[int]  # real tokens in each row
    real: Tensor | None  # which tokens of input_ids are not padding
    column: Tensor | None  # where each token of input_ids went

    def back(self, values: Tensor) -> Tensor:
        """(batch, aligned tokens, ...) -> (batch, tokens, ...), 0 for padding."""
        if self.real is None or self.column is None:
            return values
        shape = self.real.shape + (1,) * (values.dim() - 2)
        column = self.column.clamp(max=values.shape[1] - 1).view(shape)
        values = values.gather(1, column.expand(-1, -1, *values.shape[2:]))
        return values.masked_fill(~self.real.view(shape), 0)


def align(input_ids: Tensor, attention_mask: Tensor | None) -> Aligned:
    """``attention_mask`` may also cover earlier tokens, in a cache."""
    rows, tokens = input_ids.shape
    real = None if attention_mask is None else attention_mask[:, -tokens:].bool()
    if real is None or bool(real.all()):
        return Aligned(input_ids, [tokens] * rows, None, None)
    order = (~real).int().argsort(dim=1, stable=True)  # real tokens first, in their order
    counts = real.sum(1).tolist()
    # Padding may be any number, even one outside the vocabulary.
    idx = input_ids.masked_fill(~real, 0).gather(1, order)[:, : max(1, *counts)]
    return Aligned(idx, counts, real, order.argsort(dim=1))
