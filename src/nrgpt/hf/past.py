"""The cache that transformers' generate hands from token to token: nrgpt's own, in its clothes."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from ..decode.cache import Cache
from ..decode.decoder import kept_of
from ..model.block import Steps


class NRGPTCache(TransformersCache):
    """Keys of the real tokens of each row, left-aligned (see nrgpt.decode.cache), and what else the
    next
    call must know: these tokens themselves; the columns of input_ids seen so far, padding included;
    the number of inference steps, since keys are kept for each of them; and what blocks prepare
    once for all calls.

    A text that outgrows the context is seen from its last three quarters of a context on, as in
    nrgpt.decode.generate, and all keys are computed anew.
    """

    def __init__(self, capacity: int):
        super().__init__(layers=[])
        self.keys = Cache(capacity)
        self.texts: list[list[int]] = []
        self.columns = 0
        self.steps: int | None = None
        self.plans: list[Steps] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.keys.capacity

    def reset(self) -> None:
        self.forget_keys()
        self.texts, self.columns, self.steps, self.plans = [], 0, None, None

    def forget_keys(self) -> None:
        self.keys = Cache(self.keys.capacity)

    def append(self, new: list[list[int]], columns: int) -> bool:
        """The texts grow. Whether some have outgrown the context: these are now shorter."""
        before = self.texts or [[] for _ in new]
        self.texts = [text + more for text, more in zip(before, new, strict=True)]
        self.columns += columns
        context = self.keys.capacity
        if max(map(len, self.texts)) <= context:
            return False
        kept = kept_of(context)
        if max(map(len, new)) > kept:
            raise ValueError(f"{max(map(len, new))} new tokens at once; at most {kept} are seen")
        self.texts = [text[-kept:] if len(text) > context else text for text in self.texts]
        return True

    def select(self, rows: list[int]) -> None:
        if self.columns:
            self.keys.keep_rows(rows)
            self.texts = [list(self.texts[row]) for row in rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(torch.arange(len(self.keys.lengths))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select([row for row in range(len(self.keys.lengths)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; transformers says how many as a number below zero."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove = {tokens_to_remove}: must be 0 or negative")
        if self.columns:
            if -tokens_to_remove >= min(self.keys.lengths):
                raise ValueError(
                    f"tokens_to_remove = {tokens_to_remove}: a row holds {min(self.keys.lengths)}"
                )
            self.columns += tokens_to_remove
            self.keys.lengths = [n + tokens_to_remove for n in self.keys.lengths]
            self.texts = [text[:n] for text, n in zip(self.texts, self.keys.lengths, strict=True)]

    @property
    def batch_size(self) -> int:
        return len(self.keys.lengths) if self.columns else -1
