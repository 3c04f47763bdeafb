"""Losses of a model on a split: a quick estimate, and every token once, also in bits of text."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from rich.progress import track

from ..data.shards import TokenStream
from ..data.tokenizer import GPT2Tokenizer, SymbolTokenizer, Tokenizer
from ..kernels.loss import plain_loss
from ..model.network import Network


@dataclass(frozen=True)
class SplitLoss:
    """Mean loss in nats over ``tokens`` tokens, each seen once, with at least ``least_context``
    tokens before it (fewer at the start of the split)."""

    loss: float
    tokens: int
    least_context: int


@torch.no_grad()
def estimated_loss(
    model: Network, stream: TokenStream, *, batches: int, size: int, seed: int
) -> float:
    """Mean over random batches, as nanoGPT does it. The same batches for the same seed."""
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
    """How many windows to compute at a time: their logits take at most a GiB in float32."""
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
    """Every token of the split but the first, once.

    Windows of the model's context advance by ``stride`` tokens, and each counts its last
    ``stride`` predictions, so that a token has at least context - stride + 1 before it. A
    stride of 1 gives every token its full context, at a price; the default is context / 4.
    ``size`` windows are computed at a time.
    """
    context = model.cfg.context
    stride = stride if stride is not None else max(1, context // 4)
    if not 1 <= stride <= context:
        raise ValueError(f"stride = {stride}: must be in 1 .. context = {context}")
    size = min(32, rows_at_once(model)) if size is None else size
    device = model.tokens.device
    length = min(context, len(stream) - 1)
    total, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    batches = batches_of_windows(len(stream), context, stride, size)
    for windows in track(batches, "loss", disable=not progress):
        rows = [torch.from_numpy(stream.read(start, length + 1)) for start, _ in windows]
        text = torch.stack(rows).to(device)
        last = max(count for _, count in windows)
        logits, _ = model(text[:, :-1], steps=steps, last=last, dropout=False)
        losses = plain_loss(logits, text[:, -last:], reduction="none").view(-1, last)
        counted = torch.tensor([count for _, count in windows], device=device)
        counts = torch.arange(last, device=device) >= last - counted[:, None]
        total += losses.double()[counts].sum()
        tokens += sum(count for _, count in windows)
    return SplitLoss(total.item() / tokens, tokens, context - stride + 1)


def batches_of_windows(
    tokens: int, context: int, stride: int, size: int
) -> list[list[tuple[int, int]]]:
    """(start, predictions that count) of every window. All windows have the same length. The first
    one, in which all count, is alone: of the others, a few logits are enough."""
    predictions = tokens - 1
    first = min(context, predictions)
    windows = list[tuple[int, int]]()
    done = first
    while done < predictions:
        counted = min(stride, predictions - done)
        done += counted
        windows.append((done - context, counted))
    return [[(0, first)], *(windows[i : i + size] for i in range(0, len(windows), size))]


@dataclass(frozen=True)
class Bits:
    """Bits of loss per unit of text, a character or a byte, and how many units there were."""

    unit: str
    per_unit: float
    units: int


def bits_of_text(loss: SplitLoss, stream: TokenStream, tokenizer: Tokenizer) -> Bits | None:
    """The loss of a whole split per character or, of byte pairs, per byte; None for ListOps.

    The first token is never predicted, so its bytes do not count. Nor do those of
    ``<|endoftext|>``, which stands between documents and in none; the loss on it counts.
    """
    if isinstance(tokenizer, SymbolTokenizer) and tokenizer.is_characters:
        return Bits("character", loss.loss / math.log(2), loss.tokens)
    if not isinstance(tokenizer, GPT2Tokenizer):
        return None
    lengths = np.array(
        [len(tokenizer.encoding.decode_single_token_bytes(t)) for t in range(tokenizer.vocab_size)]
    )
    lengths[tokenizer.end_of_text] = 0
    # In parts: the tokens of a large split in 64 bits each would take much memory.
    part = 1 << 20
    units = sum(
        int(lengths[stream.read(start, min(part, len(stream) - start))].sum())
        for start in range(1, len(stream), part)
    )
    return Bits("byte", loss.loss * loss.tokens / (math.log(2) * units), units)
