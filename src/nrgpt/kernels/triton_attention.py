# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of short contexts as Triton kernels. Imported only where ``dispatch`` has chosen them.

Queries and keys are read directly from the readout z, of shape (batch, tokens, 2 D), and their
gradients are written in the same layout: nothing is sliced, padded or copied. The context is cut
into tiles of tokens; a program computes one tile of one head. The tokens of a tile see all tokens
before it, and all tokens after it see them, so a mask is needed only inside the tile.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .plain import plain_attend_read
from .triton_common import by_run, in_rows, load_rows, store_rows


class Tiles(NamedTuple):
    tokens: int
    warps: int
    stages: int
    registers: int | None = None
    """The most per thread; with fewer, more programs run at a time."""


FORWARD = {16: Tiles(64, 4, 1), 32: Tiles(64, 4, 1), 64: Tiles(64, 4, 1)}
BACKWARD = {16: Tiles(64, 4, 1, 128), 32: Tiles(64, 4, 1, 128), 64: Tiles(64, 4, 1)}
"""Tiles of the two kernels by head size, rounded up; for 16 and 32 the fastest of those tried on an
H200."""


@triton.jit
def sees(query, key, STRICT: tl.constexpr):
    if STRICT:
        return key < query
    else:
        return key <= query


@triton.jit
def forward_kernel(
    z_at, out_at, log_sum_at, tokens, heads, scale, z_batch, z_token,
    STRICT: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attention for a tile of queries. The tiles that see the most keys start first."""
    pair, first = tl.program_id(0).to(tl.int64), (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE
    batch, head = pair // heads, pair % heads
    q_at = z_at + batch * z_batch + head * SIZE
    k_at = q_at + heads * SIZE
    scale *= 1.4426950408889634  # of exponents of two
    q = load_rows(q_at, first, tokens, z_token, SIZE, TILE, WIDTH)
    k = load_rows(k_at, first, tokens, z_token, SIZE, TILE, WIDTH)
    token = tl.arange(0, TILE)
    seen = sees(token[:, None], token[None, :], STRICT)
    score = tl.where(seen, tl.dot(q, tl.trans(k)), float("-inf"))
    largest = tl.maximum(tl.max(score, 1) * scale, -1e30)  # a number even where nothing is seen
    p = tl.exp2(score * scale - largest[:, None])
    total = tl.sum(p, 1)
    out = tl.dot(p.to(k.dtype), k)
    for start in range(0, first, TILE):
        k = load_rows(k_at, start, tokens, z_token, SIZE, TILE, WIDTH)
        score = tl.dot(q, tl.trans(k))
        new = tl.maximum(largest, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(k.dtype), k, out * shrink[:, None])
        largest = new
    # A token that sees nothing gets zero, and an infinite sum, so that all its shares are zero.
    is_blind = total == 0
    out = out / tl.where(is_blind, 1.0, total)[:, None]
    log_sum = tl.where(is_blind, float("inf"), largest + tl.log2(total))
    tl.store(log_sum_at + pair * tokens + first + token, log_sum, mask=first + token < tokens)
    out_at += (batch * tokens * heads + head) * SIZE
    store_rows(out_at, out, first, tokens, heads * SIZE, SIZE, TILE, WIDTH)


@triton.jit
def load_upstream(
    up_at, out_at, log_sum_at, first, tokens, up_token, out_token, scale,
    TILE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile's upstream gradient, scale upstream . out, and logsumexp: what the gradients of scores
    need of its queries. Beyond the last token all shares are zero."""
    up = load_rows(up_at, first, tokens, up_token, SIZE, TILE, WIDTH)
    out = load_rows(out_at, first, tokens, out_token, SIZE, TILE, WIDTH)
    mean = tl.sum(up.to(tl.float32) * out.to(tl.float32), 1) * scale
    token = first + tl.arange(0, TILE)
    return up, mean, tl.load(log_sum_at + token, mask=token < tokens, other=float("inf"))


@triton.jit
def backward_kernel(
    z_at, out_at, log_sum_at, up_at, dz_at, tokens, heads, scale,
    z_batch, z_token, up_batch, up_token,
    STRICT: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile's queries, from its own and earlier keys, and of its keys, from its
    own and later queries. With p and ds as (keys, queries), the latter need no transpose."""
    pair, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    batch, head = pair // heads, pair % heads
    width = heads * SIZE
    q_at = z_at + batch * z_batch + head * SIZE
    k_at = q_at + width
    up_at += batch * up_batch + head * SIZE
    out_at += batch * tokens * width + head * SIZE
    log_sum_at += pair * tokens
    in_twos = scale * 1.4426950408889634
    q = load_rows(q_at, first, tokens, z_token, SIZE, TILE, WIDTH)
    k = load_rows(k_at, first, tokens, z_token, SIZE, TILE, WIDTH)
    up, mean, log_sum = load_upstream(
        up_at, out_at, log_sum_at, first, tokens, up_token, width, scale, TILE, SIZE, WIDTH
    )
    p = tl.exp2(tl.dot(k, tl.trans(q)) * in_twos - log_sum[None, :])
    token = tl.arange(0, TILE)
    p = tl.where(sees(token[None, :], token[:, None], STRICT), p, 0.0)
    ds = p * (tl.dot(k, tl.trans(up)) * scale - mean[None, :])
    dk = tl.dot(p.to(k.dtype), up)
    dk = tl.dot(ds.to(k.dtype), q, dk)
    dq = tl.dot(tl.trans(ds.to(k.dtype)), k)
    for start in range(0, first, TILE):
        seen = load_rows(k_at, start, tokens, z_token, SIZE, TILE, WIDTH)
        p = tl.exp2(tl.dot(q, tl.trans(seen)) * in_twos - log_sum[:, None])
        ds = p * (tl.dot(up, tl.trans(seen)) * scale - mean[:, None])
        dq = tl.dot(ds.to(k.dtype), seen, dq)
    for start in range(first + TILE, tokens, TILE):
        q = load_rows(q_at, start, tokens, z_token, SIZE, TILE, WIDTH)
        up, mean, log_sum = load_upstream(
            up_at, out_at, log_sum_at, start, tokens, up_token, width, scale, TILE, SIZE, WIDTH
        )
        p = tl.exp2(tl.dot(k, tl.trans(q)) * in_twos - log_sum[None, :])
        ds = p * (tl.dot(k, tl.trans(up)) * scale - mean[None, :])
        dk = tl.dot(p.to(k.dtype), up, dk)
        dk = tl.dot(ds.to(k.dtype), q, dk)
    dz_at += batch * tokens * 2 * width + head * SIZE
    store_rows(dz_at, dq, first, tokens, 2 * width, SIZE, TILE, WIDTH)
    store_rows(dz_at + width, dk, first, tokens, 2 * width, SIZE, TILE, WIDTH)


def launch_options(
    z: Tensor, heads: int, strict: bool, table: dict[int, Tiles]
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and what the kernel is compiled for."""
    batch, tokens, both = z.shape
    size = both // (2 * heads)
    width = max(16, triton.next_power_of_2(size))
    tile, warps, stages, registers = table[width]
    if size % 8:  # unaligned rows are read number by number, each with its own address
        registers = None
    grid = batch * heads, triton.cdiv(tokens, tile)
    meta = {"STRICT": strict, "TILE": tile, "SIZE": size, "WIDTH": width}
    return grid, meta | {"num_warps": warps, "num_stages": stages, "maxnreg": registers}


def empty_results(z: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, tokens, both = z.shape
    out = z.new_empty(batch, tokens, both // 2)
    return out, z.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("nrgpt::attend_read", mutates_args=())
def attend_read(z: Tensor, heads: int, scale: float, strict: bool) -> tuple[Tensor, Tensor]:
    """sum_B softmax_B(scale q_A . k_B) k_B, (batch, tokens, D), and the logsumexp of the scores to
    base two, (batch, heads, tokens), for the backward pass."""
    z = in_rows(z)
    out, log_sum = empty_results(z, heads)
    grid, options = launch_options(z, heads, strict, FORWARD)
    with torch.cuda.device_of(z):
        forward_kernel[grid](
            z, out, log_sum, z.shape[1], heads, scale, z.stride(0), z.stride(1), **options
        )
    return out, log_sum


@torch.library.custom_op("nrgpt::attend_read_backward", mutates_args=())
def attend_read_backward(
    z: Tensor,
    out: Tensor,
    log_sum: Tensor,
    upstream: Tensor,
    heads: int,
    scale: float,
    strict: bool,
) -> Tensor:
    """The gradient of z, given that of ``out``."""
    z, upstream = in_rows(z), in_rows(upstream)
    dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    grid, options = launch_options(z, heads, strict, BACKWARD)
    with torch.cuda.device_of(z):
        backward_kernel[grid](
            z, out.contiguous(), log_sum.contiguous(), upstream, dz, z.shape[1], heads, scale,
            z.stride(0), z.stride(1), upstream.stride(0), upstream.stride(1), **options,
        )  # fmt: skip
    return dz


@attend_read.register_fake
def _(z: Tensor, heads: int, scale: float, strict: bool) -> tuple[Tensor, Tensor]:
    return empty_results(z, heads)


@attend_read_backward.register_fake
def _(z: Tensor, *others: Any) -> Tensor:
    return torch.empty(z.shape, dtype=z.dtype, device=z.device)


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    z, *ctx.how = inputs
    ctx.save_for_backward(z, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else each step would fill a tensor with zeros


def backward_of_attend(
    ctx: Any, upstream: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return None, None, None, None
    return attend_read_backward(*ctx.saved_tensors, upstream, *ctx.how), None, None, None


def keep_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, _, _, upstream, *ctx.how = inputs
    ctx.save_for_backward(z, upstream)


def backward_of_backward(ctx: Any, on_dz: Tensor) -> tuple[Tensor | None, ...]:
    """Second derivatives, which are rare: by the plain version, with a backend that has them."""
    heads, scale, strict = ctx.how
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        z, first = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        out = plain_attend_read(z, heads, scale, strict=strict)
        if not out.requires_grad:  # a single token, which sees nothing
            return (None,) * 7
        (dz,) = torch.autograd.grad(out, z, first, create_graph=True)
        on_z, on_first = torch.autograd.grad(dz, (z, first), on_dz)
    return on_z, None, None, on_first, None, None, None


@attend_read.register_vmap
def _(
    info: Any, in_dims: Any, z: Tensor, heads: int, scale: float, strict: bool
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    out, log_sum = attend_read(*by_run(info, in_dims, [z]), heads, scale, strict)
    runs = info.batch_size, -1
    return (out.unflatten(0, runs), log_sum.unflatten(0, runs)), (0, 0)


@attend_read_backward.register_vmap
def _(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
    *tensors, heads, scale, strict = arguments
    dz = attend_read_backward(*by_run(info, in_dims, tensors), heads, scale, strict)
    return dz.unflatten(0, (info.batch_size, -1)), 0


attend_read.register_autograd(backward_of_attend, setup_context=keep_for_backward)
attend_read_backward.register_autograd(backward_of_backward, setup_context=keep_for_second_backward)
