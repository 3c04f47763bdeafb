# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernels. Imported only where ``dispatch`` has chosen them."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .feedforward import plain_pair_force, plain_square_force

ACTIVATION = {"relu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def load_rows(at, first, count, stride, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a matrix from ``first`` on; zeros where it has ended."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (first + row < count) & (column < width)
    return tl.load(at + first * stride + row * stride + column, mask=inside, other=0.0)


@triton.jit
def store_rows(at, block, first, count, stride, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (first + row < count) & (column < width)
    tl.store(at + first * stride + row * stride + column, block, mask=inside)


@triton.jit
def activation_and_slopes(z, KIND: tl.constexpr):
    """sigma, sigma' and sigma'' of z."""
    if KIND == 0:
        return tl.where(z > 0, z, 0.0), tl.where(z > 0, 1.0, 0.0), tl.zeros_like(z)
    elif KIND == 1:
        Phi = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        phi = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return z * Phi, Phi + z * phi, phi * (2.0 - z * z)
    else:
        u = 0.7978845608028654 * (z + 0.044715 * z * z * z)
        du = 0.7978845608028654 * (1.0 + 0.134145 * z * z)
        t = 2.0 * tl.sigmoid(2.0 * u) - 1.0
        s = 1.0 - t * t
        bend = 0.7978845608028654 * 0.26829 * z
        slope = 0.5 * (1.0 + t) + 0.5 * z * s * du
        return 0.5 * z * (1.0 + t), slope, s * du + 0.5 * z * (s * bend - 2.0 * t * s * du * du)


@triton.jit
def force_kernel(
    z_at, up_at, left_at, out_at, total, width, left_total, left_width,
    z_row, up_row, left_row, out_row,
    KIND: tl.constexpr, PAIR: tl.constexpr, BACKWARD: tl.constexpr, LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of ``width`` activations; with PAIR, z_2 follows z_1 in each row. With LEFT, rows of
    ``left_width`` other numbers are put before those of the result."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if LEFT:
        inside = place < left_total
        row, column = place // left_width, place % left_width
        value = tl.load(left_at + row * left_row + column, mask=inside, other=0.0)
        tl.store(out_at + row * out_row + column, value, mask=inside)
        out_at += left_width
    inside = place < total
    row, column = place // width, place % width
    z = tl.load(z_at + row * z_row + column, mask=inside, other=0.0).to(tl.float32)
    value, slope, bend = activation_and_slopes(z, KIND)
    out = out_at + row * out_row + column
    if PAIR:
        z_2 = tl.load(z_at + row * z_row + column + width, mask=inside, other=0.0).to(tl.float32)
        if BACKWARD:
            up = up_at + row * up_row + column
            up_1 = tl.load(up, mask=inside, other=0.0).to(tl.float32)
            up_2 = tl.load(up + width, mask=inside, other=0.0).to(tl.float32)
            tl.store(out, up_1 * bend * z_2 + up_2 * slope, mask=inside)
            tl.store(out + width, up_1 * slope, mask=inside)
        else:
            tl.store(out, slope * z_2, mask=inside)
            tl.store(out + width, value, mask=inside)
    elif BACKWARD:
        up_1 = tl.load(up_at + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, 2.0 * up_1 * (slope * slope + value * bend), mask=inside)
    else:
        tl.store(out, 2.0 * value * slope, mask=inside)


def launch_force(
    z: Tensor, upstream: Tensor | None, activation: str, pair: bool, left: Tensor | None = None
) -> Tensor:
    rows = by_rows(z)
    given = rows if upstream is None else by_rows(upstream)
    beside = rows[:, :0] if left is None else by_rows(left)
    out_width = beside.shape[1] + rows.shape[1]
    out = torch.empty(*z.shape[:-1], out_width, dtype=z.dtype, device=z.device)
    width = rows.shape[1] // 2 if pair else rows.shape[1]
    total = rows.shape[0] * width
    block = 1024
    with torch.cuda.device_of(z):
        force_kernel[(triton.cdiv(max(total, beside.numel()), block),)](
            rows, given, beside, out, total, width, beside.numel(), beside.shape[1],
            rows.stride(0), given.stride(0), beside.stride(0), out_width,
            KIND=ACTIVATION[activation], PAIR=pair, BACKWARD=upstream is not None,
            LEFT=left is not None, BLOCK=block,
        )  # fmt: skip
    return out


@torch.library.custom_op("nrgpt::force", mutates_args=())
def force(z: Tensor, activation: str, pair: bool) -> Tensor:
    """The force of FF2W (``pair``) or FF1."""
    return launch_force(z, None, activation, pair)


@torch.library.custom_op("nrgpt::force_backward", mutates_args=())
def force_backward(z: Tensor, upstream: Tensor, activation: str, pair: bool) -> Tensor:
    """The gradient of z, given that of the force."""
    return launch_force(z, upstream, activation, pair)


@force.register_fake
def _(z: Tensor, activation: str, pair: bool) -> Tensor:
    return torch.empty(z.shape, dtype=z.dtype, device=z.device)


@force_backward.register_fake
def _(z: Tensor, upstream: Tensor, activation: str, pair: bool) -> Tensor:
    return torch.empty(z.shape, dtype=z.dtype, device=z.device)


def keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation, ctx.pair = inputs
    ctx.save_for_backward(*tensors)


def backward_of_force(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
    (z,) = ctx.saved_tensors
    return force_backward(z, upstream, ctx.activation, ctx.pair), None, None


def backward_of_backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """For the few who differentiate twice: by the plain version."""
    plain = plain_pair_force if ctx.pair else plain_square_force
    with torch.enable_grad():
        z, first = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        (gradient,) = torch.autograd.grad(plain(z, ctx.activation), z, first, create_graph=True)
        return (*torch.autograd.grad(gradient, (z, first), upstream), None, None)


@force.register_vmap
def _(info: Any, in_dims: Any, z: Tensor, activation: str, pair: bool) -> tuple[Tensor, int]:
    return force(z.movedim(in_dims[0], 0), activation, pair), 0


@force_backward.register_vmap
def _(
    info: Any, in_dims: Any, z: Tensor, upstream: Tensor, activation: str, pair: bool
) -> tuple[Tensor, int]:
    z, upstream = (
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip((z, upstream), in_dims[:2], strict=True)
    )
    return force_backward(z, upstream, activation, pair), 0


force.register_autograd(backward_of_force, setup_context=keep_arguments)
force_backward.register_autograd(backward_of_backward, setup_context=keep_arguments)


def by_rows(z: Tensor) -> Tensor:
    """(..., n) as (rows, n) with neighbouring numbers in each row; a view where possible."""
    rows = z.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def in_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def by_run(info: Any, in_dims: Any, tensors: list[Any]) -> list[Any]:
    """The axis that vmap runs over and our own axis of runs, as one."""

    def merged(x: Tensor, dim: int | None) -> Tensor:
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    pairs = zip(tensors, in_dims[: len(tensors)], strict=True)
    return [None if x is None else merged(x, dim).flatten(0, 1) for x, dim in pairs]


@triton.jit
def attend_kernel(
    q_at, kept_at, last_at, out_at, weight_at, heads, size, scale, per_split,
    q_row, q_head, kept_row, kept_head, kept_token, splits,
    STRICT: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """One program: one row, one head, and one part of the keys, read once as keys and values."""
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
    (and itself, if not strict); ``last`` (rows,) says where it stands. Keys are values. All heads
    may share their keys."""
    rows, heads, _, size = q.shape
    capacity = kept.shape[2]
    block_size = triton.next_power_of_2(size)
    block = max(8, min(128, 8192 // block_size))
    # Enough programs to fill the chip, each with a block of keys at least.
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


@triton.jit
def cross_entropy_kernel(
    logits_at, target_at, weight_at, loss_at, kinds, row_stride,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of one row of logits; the row becomes its gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_at + row * row_stride
    target, weight = tl.load(target_at + row), tl.load(weight_at + row)
    answer = tl.load(logits + target).to(tl.float32)  # before anything is overwritten
    column = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, kinds, BLOCK):
        z = tl.load(logits + start + column, mask=start + column < kinds, other=float("-inf")).to(
            tl.float32
        )
        new = tl.maximum(largest, z)
        total = total * tl.exp(largest - new) + tl.exp(z - new)
        largest = new
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tl.store(loss_at + row, (log_sum - answer) * weight)
    if GRADIENT:
        for start in range(0, kinds, BLOCK):
            inside = start + column < kinds
            z = tl.load(logits + start + column, mask=inside, other=0.0).to(tl.float32)
            error = tl.exp(z - log_sum) - tl.where(start + column == target, 1.0, 0.0)
            tl.store(logits + start + column, error * weight, mask=inside)


@torch.library.custom_op("nrgpt::cross_entropy_", mutates_args={"logits"})
def cross_entropy_(logits: Tensor, targets: Tensor, weight: Tensor, gradient: bool) -> Tensor:
    """Weighted losses of rows of logits, in float32; with ``gradient``, logits become those of the
    sum of these losses."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(len(logits),)](
            logits, targets, weight, losses, logits.shape[1], logits.stride(0),
            GRADIENT=gradient, BLOCK=4096, num_warps=8,
        )  # fmt: skip
    return losses


@cross_entropy_.register_fake
def _(logits: Tensor, targets: Tensor, weight: Tensor, gradient: bool) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)
