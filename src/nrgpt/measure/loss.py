"""A model's loss on a split: a quick estimate, or exactly, also in bits per character or byte."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ..check import check
from ..data.masking import IGNORED, Masking
from ..data.shards import TokenStream
from ..data.tokenizer import Tokenizer
from ..kernels.loss import plain_loss
from ..model.network import Network


@dataclass(frozen=True)
class SplitLoss:
    """Mean loss in nats over ``tokens`` tokens, each counted once. Each has at least
    ``least_context`` tokens before it, except at the start of the split."""

    loss: float
    tokens: int
    least_context: int


class Batches(Protocol):
    """A stream whose batches are next-token predictions, or texts to complete."""

    def batch(self, *, seed: int, step: int, size: int, context: int) -> tuple[Tensor, Tensor]: ...


@torch.no_grad()
def estimated_loss(model: Network, stream: Batches, *, batches: int, size: int, seed: int) -> float:
    """Mean over random batches, as in nanoGPT. The same seed gives the same batches."""
    device = model.tokens.device
    total = torch.zeros((), device=device)
    rows = rows_at_once(model)
    for i in range(batches):
        x, y = stream.batch(seed=seed, step=i, size=size, context=model.cfg.context)
        for some_x, some_y in zip(x.split(rows), y.split(rows), strict=True):
            _, loss = model(some_x.to(device), some_y.to(device), want_logits=False, dropout=False)
            assert loss is not None
            total += loss * len(some_x) / size
    return (total / batches).item()


def rows_at_once(model: Network) -> int:
    """How many windows to compute at a time, so that their logits take at most 1 GiB (float32)."""
    return max(1, 2**28 // (model.cfg.context * model.cfg.vocab_size))


@torch.no_grad()
def split_loss(
    model: Network,
    stream: TokenStream,
    *,
    stride: int | None = None,
    size: int | None = None,
    steps: int | None = None,
    progress: bool = False,
) -> SplitLoss:
    """The loss over all tokens of the split but the first, each counted once.

    Windows as long as the model's context advance by ``stride`` tokens, and the last ``stride``
    predictions of each are counted. So each token has at least context - stride + 1 tokens before
    it. A stride of 1 gives every token its full context, which is slow; the default is context / 4.
    ``size`` windows are computed at a time.
    """
    if model.cfg.block == "et":
        raise ValueError("block = 'et': it predicts missing tokens, not the next: see masked_loss")
    context = model.cfg.context
    stride = max(1, context // 4) if stride is None else stride
    check(1 <= stride <= context, "stride", stride, f"in 1 .. context = {context}")
    size = min(32, rows_at_once(model)) if size is None else size
    device = model.tokens.device
    length = min(context, len(stream) - 1)
    exact = torch.device("cpu") if device.type == "mps" else device  # Apple's have no float64
    total, tokens = torch.zeros((), dtype=torch.float64, device=exact), 0
    batches = batches_of_windows(len(stream), context, stride, size)
    for windows in track(batches, "loss", console=Console(stderr=True), disable=not progress):
        rows = [torch.from_numpy(stream.read(start, length + 1)) for start, _ in windows]
        text = torch.stack(rows).to(device)
        counted = torch.tensor([count for _, count in windows], device=device)
        last = max(count for _, count in windows)
        logits, _ = model(text[:, :-1], steps=steps, last=last, dropout=False)
        losses = plain_loss(logits, text[:, -last:], reduction="none").view(-1, last)
        is_counted = torch.arange(last, device=device) >= last - counted[:, None]
        total += losses[is_counted].to(exact).double().sum()
        tokens += sum(count for _, count in windows)
    return SplitLoss(total.item() / tokens, tokens, context - stride + 1)


@torch.no_grad()
def masked_loss(
    model: Network,
    stream: TokenStream,
    masking: Masking,
    *,
    steps: int | None = None,
    size: int = 32,
    seed: int = 0,
) -> SplitLoss:
    """The mean loss at missing tokens, over all disjoint windows of the split, each as long as the
    context. Which tokens are missing is a function of ``seed``."""
    context, device = model.cfg.context, model.tokens.device
    length = min(context, len(stream))
    total, tokens = 0.0, 0
    for i, starts in enumerate(windows_of(len(stream), length, size)):
        texts, targets = masking(stream.windows(starts, length), seed=seed, step=i)
        count = int((targets != IGNORED).sum())
        _, loss = model(texts.to(device), targets.to(device), steps=steps, dropout=False)
        assert loss is not None
        total, tokens = total + loss.item() * count, tokens + count
    return SplitLoss(total / tokens, tokens, length - 1)


def windows_of(tokens: int, length: int, size: int) -> Iterator[np.ndarray]:
    """Where disjoint windows begin, ``size`` at a time."""
    starts = length * np.arange(tokens // length)
    for first in range(0, len(starts), size):
        yield starts[first : first + size]


def batches_of_windows(
    tokens: int, context: int, stride: int, size: int
) -> list[list[tuple[int, int]]]:
    """(start, number of predictions to count) of each window. All windows have the same length.
    The first has a batch of its own: it needs all its logits, while the others need only a few."""
    predictions = tokens - 1
    first = min(context, predictions)
    ends = [min(done + stride, predictions) for done in range(first, predictions, stride)]
    windows = [(end - context, end - before) for before, end in pairwise([first, *ends])]
    return [[(0, first)], *(windows[i : i + size] for i in range(0, len(windows), size))]


@dataclass(frozen=True)
class Bits:
    """Bits of loss per unit of text (a character or a byte), and the number of units."""

    unit: str
    per_unit: float
    units: int


def bits_of_text(loss: SplitLoss, stream: TokenStream, tokenizer: Tokenizer) -> Bits | None:
    """The loss over a whole split, per character or (byte pairs) per byte; None for ListOps.

    The first token is never predicted, so its bytes are not counted. ``<|endoftext|>`` is between
    documents and not part of any, so it counts as 0 bytes, but its loss is included.
    """
    if tokenizer.kind == "characters":
        return Bits("character", loss.loss / math.log(2), loss.tokens)
    found = tokenizer.byte_lengths()
    if found is None:
        return None
    lengths = np.array(found)
    part = 1 << 20  # to save memory: a large split would be expanded to 64 bits per token
    units = sum(
        int(lengths[stream.read(start, min(part, len(stream) - start))].sum())
        for start in range(1, len(stream), part)
    )
    return Bits("byte", loss.loss * loss.tokens / (math.log(2) * units), units)
