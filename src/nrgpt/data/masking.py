"""Texts with missing tokens, to be completed: the task of models that see both sides."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .shards import TokenStream

IGNORED = -100
"""The target where nothing is missing."""


class Masking(NamedTuple):
    """How tokens go missing."""

    share: float
    token: int
    """Stands where one is missing: one that no text holds."""

    def __call__(
        self, texts: Tensor, *, seed: int, step: int, rank: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Texts (batch, tokens) with a share of their tokens missing, at least one in each, and
        what was there. Which ones is a function of (seed, step, rank)."""
        draws = np.random.default_rng([seed, step, rank, 2]).random(tuple(texts.shape))
        is_missing = torch.from_numpy(
            (draws < self.share) | (draws == draws.min(-1, keepdims=True))
        )
        is_missing = is_missing.to(texts.device)
        return (
            torch.where(is_missing, self.token, texts),
            torch.where(is_missing, texts, IGNORED),
        )


class MaskedStream:
    """The batches of a stream, with missing tokens."""

    def __init__(self, stream: TokenStream, masking: Masking):
        self.stream, self.masking = stream, masking

    def batch(self, *, seed: int, step: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        texts, _ = self.stream.batch(seed=seed, step=step, size=size, context=context)
        return self.masking(texts, seed=seed, step=step)
