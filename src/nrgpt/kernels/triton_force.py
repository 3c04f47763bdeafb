# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Forces of the feed-forward energies, elementwise, as Triton kernels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .plain import plain_pair_force, plain_square_force
from .triton_common import ACTIVATION, activation_and_slopes, in_rows, keep_arguments


@triton.jit
def force_kernel(
    z_at, up_at, left_at, out_at, total, width, left_total, left_width,
    z_row, up_row, left_row, out_row,
    KIND: tl.constexpr, PAIR: tl.constexpr, BACKWARD: tl.constexpr, LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of ``width`` activations; with PAIR, z_2 follows z_1 in each row. With LEFT, rows of
    ``left_width`` other numbers are put to the left of the result."""
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
    rows = in_rows(z.flatten(0, -2))
    given = rows if upstream is None else in_rows(upstream.flatten(0, -2))
    beside = rows[:, :0] if left is None else in_rows(left.flatten(0, -2))
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


def backward_of_force(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
    (z,) = ctx.saved_tensors
    return force_backward(z, upstream, ctx.activation, ctx.pair), None, None


def backward_of_backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """Second derivatives, which are rare: by the plain version."""
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
