# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of one new token to the cache, and keeping its keys, as Triton kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def attend_kernel(
    q_at, kept_at, last_at, out_at, weight_at, heads, size, scale, per_split,
    q_row, q_head, kept_row, kept_head, kept_token, splits,
    STRICT: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """A program has one row, one head and one part of the keys, read once as keys and values."""
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = pair // heads, pair % heads
    column = tl.arange(0, SIZE)
    there = column < size
    q = tl.load(q_at + row * q_row + head * q_head + column, mask=there, other=0.0)
    q = q.to(tl.float32) * scale
    stop = tl.load(last_at + row) + (0 if STRICT else 1)
    first = split * per_split
    stop = tl.minimum(stop, first + per_split)
    largest = float("-inf")
    total = 0.0
    out = tl.zeros([SIZE], tl.float32)
    keys = kept_at + row * kept_row + head * kept_head
    for start in range(first, stop, BLOCK):
        token = start + tl.arange(0, BLOCK)
        seen = token < stop
        k = tl.load(
            keys + token[:, None] * kept_token + column[None, :],
            mask=seen[:, None] & there[None, :],
            other=0.0,
        ).to(tl.float32)
        score = tl.where(seen, tl.sum(k * q[None, :], 1), float("-inf"))
        new = tl.maximum(largest, tl.max(score, 0))
        p = tl.exp(score - new)
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(p, 0)
        out = out * shrink + tl.sum(p[:, None] * k, 0)
        largest = new
    place = pair * splits + split
    if FINAL:
        # A token that sees nothing gets zero.
        out = tl.where(total == 0, 0.0, out / total)
    else:
        tl.store(weight_at + 2 * place, largest)
        tl.store(weight_at + 2 * place + 1, total)
    tl.store(out_at + place * size + column, out, mask=there)


@triton.jit
def combine_kernel(
    part_at, weight_at, out_at, size, splits, SPLITS: tl.constexpr, SIZE: tl.constexpr
):
    pair = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, SIZE)
    is_split = split < splits
    place = pair * splits + split
    largest = tl.load(weight_at + 2 * place, mask=is_split, other=float("-inf"))
    total = tl.load(weight_at + 2 * place + 1, mask=is_split, other=0.0)
    # Parts without a key have a total of zero; their largest score is -inf.
    top = tl.maximum(tl.max(largest, 0), -1e30)
    share = tl.where(total == 0, 0.0, tl.exp(largest - top))
    mask = is_split[:, None] & (column < size)[None, :]
    part = tl.load(part_at + place[:, None] * size + column[None, :], mask=mask, other=0.0)
    whole = tl.sum(total * share, 0)
    out = tl.where(whole == 0, 0.0, tl.sum(part * share[:, None], 0) / whole)
    tl.store(out_at + pair * size + column, out, mask=column < size)


def attend_one(q: Tensor, kept: Tensor, last: Tensor, scale: float, *, strict: bool) -> Tensor:
    """Attention of one new token in each row, q (rows, heads, 1, size), to the kept keys before it
    (and its own, if not strict); ``last`` (rows,) is its position. Keys are values. All heads may
    share their keys."""
    rows, heads, _, size = q.shape
    capacity = kept.shape[2]
    block_size = triton.next_power_of_2(size)
    block = max(8, min(128, 8192 // block_size))
    # Enough programs to fill the chip, each with at least one block of keys.
    splits = max(1, min(512 // (rows * heads), capacity // block, 64))
    per_split = triton.cdiv(triton.cdiv(capacity, splits), block) * block
    splits = triton.cdiv(capacity, per_split)
    final = splits == 1
    out = torch.empty(rows, heads, 1, size, dtype=q.dtype, device=q.device)
    part, weight = out, out
    if not final:
        part = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=q.device)
        weight = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        attend_kernel[(rows * heads, splits)](
            q, kept, last, part, weight, heads, size, scale, per_split,
            q.stride(0), q.stride(1), kept.stride(0), kept.stride(1) if kept.shape[1] > 1 else 0,
            kept.stride(2), splits,
            STRICT=strict, BLOCK=block, SIZE=block_size, FINAL=final,
        )  # fmt: skip
        if not final:
            combine_kernel[(rows * heads,)](
                part, weight, out, size, splits,
                SPLITS=triton.next_power_of_2(splits), SIZE=block_size,
            )  # fmt: skip
    return out


@triton.jit
def keep_kernel(
    keys_at, kept_at, place_at, heads, size, keys_row, keys_head, kept_row, kept_head, kept_token,
    SIZE: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // heads, pair % heads
    column = tl.arange(0, SIZE)
    place = tl.load(place_at + row)
    key = tl.load(keys_at + row * keys_row + head * keys_head + column, mask=column < size)
    kept = kept_at + row * kept_row + head * kept_head + place * kept_token
    tl.store(kept + column, key, mask=column < size)


def keep_one(kept: Tensor, keys: Tensor, place: Tensor) -> None:
    """Put one token's keys (rows, heads, 1, size) into kept (rows, heads, capacity, size), at
    ``place`` (rows, 1)."""
    rows, heads, _, size = keys.shape
    with torch.cuda.device_of(keys):
        keep_kernel[(rows * heads,)](
            keys, kept, place, heads, size, keys.stride(0), keys.stride(1),
            kept.stride(0), kept.stride(1), kept.stride(2), SIZE=triton.next_power_of_2(size),
        )  # fmt: skip
