"""nrgpt's cache behind transformers' interface, for generate."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from ..decode.cache import Cache
from ..decode.decoder import kept_of
from ..model.network import Plans


class NRGPTCache(TransformersCache):
    """The keys of each row's real tokens, left-aligned (see nrgpt.decode.cache), and what else the
    next call needs: the tokens; the number of columns of input_ids so far, with padding; the number
    of inference steps, since each has its own keys; and what the blocks plan once.

    When a text outgrows the context, only its last three quarters of a context are kept, as in
    nrgpt.decode.generate, and all keys are computed again.
    """

    def __init__(self, capacity: int):
        super().__init__(layers=[])
        self.keys = Cache(capacity)
        self.texts: list[list[int]] = []
        self.columns = 0
        self.steps: int | None = None
        self.plans: Plans | None = None

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
        """Add new tokens to the texts, and cut those that outgrow the context. Returns whether
        any was cut."""
        before = self.texts or [[] for _ in new]
        self.texts = [text + more for text, more in zip(before, new, strict=True)]
        self.columns += columns
        context = self.keys.capacity
        if max(map(len, self.texts)) <= context:
            return False
        kept = kept_of(context)
        if (most := max(map(len, new))) > kept:
            raise ValueError(f"{most} new tokens at once past the context; at most {kept} fit")
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
        """Forget the last tokens. transformers passes their number as a negative one."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove = {tokens_to_remove}: must be 0 or negative")
        if self.columns:
            if -tokens_to_remove >= (fewest := min(self.keys.lengths)):
                raise ValueError(f"tokens_to_remove = {tokens_to_remove}: a row holds {fewest}")
            self.columns += tokens_to_remove
            self.keys.lengths = [n + tokens_to_remove for n in self.keys.lengths]
            self.texts = [text[:n] for text, n in zip(self.texts, self.keys.lengths, strict=True)]

    @property
    def batch_size(self) -> int:
        return len(self.keys.lengths) if self.columns else -1
