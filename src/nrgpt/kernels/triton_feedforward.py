# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The feed-forward part of a step as Triton kernels, for small widths. Imported only where
``dispatch`` has chosen them.

Nothing as wide as the hidden layer is written in the forward pass: each program holds some tokens
and goes through the hidden units block by block. The backward pass computes z again. All tensors
begin with an axis of runs, (runs, tokens, D) and (runs, rows of R, D), so that packed runs share
one launch. ``back`` is the transpose of the way back: as R, a row of length D for each row of z.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .feedforward import plain_feedforward
from .triton_kernels import ACTIVATION, activation_and_slopes, keep_arguments


class Blocks(NamedTuple):
    tokens: int
    hidden: int
    warps: int
    stages: int


FORWARD = {32: Blocks(64, 64, 4, 3), 64: Blocks(64, 64, 4, 3), 128: Blocks(128, 64, 8, 2)}
BACKWARD = {32: Blocks(64, 64, 4, 3), 64: Blocks(64, 32, 4, 3), 128: Blocks(128, 32, 8, 2)}
WEIGHTS = {32: Blocks(64, 64, 8, 3), 64: Blocks(32, 128, 8, 3), 128: Blocks(32, 128, 8, 3)}
"""Block sizes of the three kernels by width, rounded up: as large as registers allow."""
KEEPS_HIDDEN = False
"""Whether the backward pass writes down the force and the gradient of z, for ordinary products to
make the gradients of the weights of; else a third kernel computes them once more."""
TOGETHER = 64
"""Up to this width, one launch of the third kernel makes the gradients of R and of back. Beyond,
their sums would not fit into registers."""
PROGRAMS = 132
"""How many programs fill the chip: its multiprocessors."""


@triton.jit
def load_rows(at, first, count, stride, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a matrix from ``first`` on; zeros where it has ended."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (first + row < count) & (column < width)
    return tl.load(at + first * stride + row * stride + column, mask=inside, other=0.0)


@triton.jit
def load_bias(at, first, count, ROWS: tl.constexpr, BIAS: tl.constexpr):
    if BIAS:
        row = first + tl.arange(0, ROWS)
        return tl.load(at + row, mask=row < count, other=0.0).to(tl.float32)
    else:
        return tl.zeros([ROWS], tl.float32)


@triton.jit
def store_rows(at, block, first, count, stride, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (first + row < count) & (column < width)
    tl.store(at + first * stride + row * stride + column, block, mask=inside)


@triton.jit
def forces_and_slopes(z_1, z_2, up_1, up_2, KIND: tl.constexpr, PAIR: tl.constexpr):
    """The force on z_1 and z_2, and their gradients given those of the force."""
    value, slope, bend = activation_and_slopes(z_1, KIND)
    if PAIR:
        return slope * z_2, value, up_1 * bend * z_2 + up_2 * slope, up_1 * slope
    else:
        return 2.0 * value * slope, value, 2.0 * up_1 * (slope * slope + value * bend), value


@triton.jit
def forward_kernel(
    g_at, R_at, bias_at, back_at, out_at, tokens, width, hidden,
    g_run, g_row, R_run, R_row, bias_run, back_run, back_row,
    KIND: tl.constexpr, PAIR: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: some tokens of one run."""
    first, run = tl.program_id(0).to(tl.int64) * TOKENS, tl.program_id(1).to(tl.int64)
    R_1, back_1, bias_1 = R_at + run * R_run, back_at + run * back_run, bias_at + run * bias_run
    R_2, back_2, bias_2 = R_1 + hidden * R_row, back_1 + hidden * back_row, bias_1 + hidden
    g = load_rows(g_at + run * g_run, first, tokens, g_row, width, TOKENS, WIDTH)
    out = tl.zeros([TOKENS, WIDTH], tl.float32)
    for unit in range(0, hidden, HIDDEN):
        rows = load_rows(R_1, unit, hidden, R_row, width, HIDDEN, WIDTH)
        z_1 = tl.dot(g, tl.trans(rows)) + load_bias(bias_1, unit, hidden, HIDDEN, BIAS)[None, :]
        z_2 = z_1
        if PAIR:
            rows = load_rows(R_2, unit, hidden, R_row, width, HIDDEN, WIDTH)
            z_2 = tl.dot(g, tl.trans(rows)) + load_bias(bias_2, unit, hidden, HIDDEN, BIAS)[None, :]
        f_1, f_2, _, _ = forces_and_slopes(z_1, z_2, z_1, z_2, KIND, PAIR)
        rows = load_rows(back_1, unit, hidden, back_row, width, HIDDEN, WIDTH)
        out = tl.dot(f_1.to(g.dtype), rows, out)
        if PAIR:
            rows = load_rows(back_2, unit, hidden, back_row, width, HIDDEN, WIDTH)
            out = tl.dot(f_2.to(g.dtype), rows, out)
    store_rows(out_at + run * tokens * width, out, first, tokens, width, width, TOKENS, WIDTH)


@triton.jit
def backward_kernel(
    g_at, R_at, bias_at, back_at, up_at, dg_at, f_at, dz_at, tokens, width, hidden,
    g_run, g_row, R_run, R_row, bias_run, back_run, back_row, up_run, up_row,
    KIND: tl.constexpr, PAIR: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr,
    TOKENS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of g. One program: some tokens of one run. With KEEP, the force and the gradient
    of z are written down as well."""
    first, run = tl.program_id(0).to(tl.int64) * TOKENS, tl.program_id(1).to(tl.int64)
    R_1, back_1, bias_1 = R_at + run * R_run, back_at + run * back_run, bias_at + run * bias_run
    R_2, back_2, bias_2 = R_1 + hidden * R_row, back_1 + hidden * back_row, bias_1 + hidden
    kept_row = 2 * hidden if PAIR else hidden
    f_at += run * tokens * kept_row
    dz_at += run * tokens * kept_row
    g = load_rows(g_at + run * g_run, first, tokens, g_row, width, TOKENS, WIDTH)
    up = load_rows(up_at + run * up_run, first, tokens, up_row, width, TOKENS, WIDTH)
    dg = tl.zeros([TOKENS, WIDTH], tl.float32)
    for unit in range(0, hidden, HIDDEN):
        rows_1 = load_rows(R_1, unit, hidden, R_row, width, HIDDEN, WIDTH)
        z_1 = tl.dot(g, tl.trans(rows_1)) + load_bias(bias_1, unit, hidden, HIDDEN, BIAS)[None, :]
        rows = load_rows(back_1, unit, hidden, back_row, width, HIDDEN, WIDTH)
        up_1 = tl.dot(up, tl.trans(rows))
        rows_2, z_2, up_2 = rows_1, z_1, up_1
        if PAIR:
            rows_2 = load_rows(R_2, unit, hidden, R_row, width, HIDDEN, WIDTH)
            bias = load_bias(bias_2, unit, hidden, HIDDEN, BIAS)
            z_2 = tl.dot(g, tl.trans(rows_2)) + bias[None, :]
            rows = load_rows(back_2, unit, hidden, back_row, width, HIDDEN, WIDTH)
            up_2 = tl.dot(up, tl.trans(rows))
        f_1, f_2, dz_1, dz_2 = forces_and_slopes(z_1, z_2, up_1, up_2, KIND, PAIR)
        dg = tl.dot(dz_1.to(g.dtype), rows_1, dg)
        if PAIR:
            dg = tl.dot(dz_2.to(g.dtype), rows_2, dg)
        if KEEP:
            left = hidden - unit
            store_rows(f_at + unit, f_1, first, tokens, kept_row, left, TOKENS, HIDDEN)
            store_rows(dz_at + unit, dz_1, first, tokens, kept_row, left, TOKENS, HIDDEN)
            if PAIR:
                place = hidden + unit
                store_rows(f_at + place, f_2, first, tokens, kept_row, left, TOKENS, HIDDEN)
                store_rows(dz_at + place, dz_2, first, tokens, kept_row, left, TOKENS, HIDDEN)
    store_rows(dg_at + run * tokens * width, dg, first, tokens, width, width, TOKENS, WIDTH)


@triton.jit
def weights_kernel(
    g_at, R_at, bias_at, back_at, up_at, dR_at, dback_at, dbias_at, tokens, width, hidden,
    g_run, g_row, R_run, R_row, bias_run, back_run, back_row, up_run, up_row,
    part_tokens, part_stride, OF_R: tl.constexpr, OF_BACK: tl.constexpr,
    KIND: tl.constexpr, PAIR: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of R and the bias, or of back, or all. One program: some hidden units of one
    run, and one part of the tokens. Units are rows here, tokens columns, as the last products want
    them."""
    unit, part = tl.program_id(0) * HIDDEN, tl.program_id(1).to(tl.int64)
    run = tl.program_id(2).to(tl.int64)
    R_1, back_1, bias_1 = R_at + run * R_run, back_at + run * back_run, bias_at + run * bias_run
    R_2, back_2, bias_2 = R_1 + hidden * R_row, back_1 + hidden * back_row, bias_1 + hidden
    rows_1 = load_rows(R_1, unit, hidden, R_row, width, HIDDEN, WIDTH)
    back_rows_1 = load_rows(back_1, unit, hidden, back_row, width, HIDDEN, WIDTH)
    b_1 = load_bias(bias_1, unit, hidden, HIDDEN, BIAS)
    dR_1 = tl.zeros([HIDDEN, WIDTH], tl.float32)
    dback_1 = tl.zeros([HIDDEN, WIDTH], tl.float32)
    db_1 = tl.zeros([HIDDEN], tl.float32)
    rows_2, back_rows_2, b_2 = rows_1, back_rows_1, b_1
    dR_2, dback_2, db_2 = dR_1, dback_1, db_1
    if PAIR:
        rows_2 = load_rows(R_2, unit, hidden, R_row, width, HIDDEN, WIDTH)
        back_rows_2 = load_rows(back_2, unit, hidden, back_row, width, HIDDEN, WIDTH)
        b_2 = load_bias(bias_2, unit, hidden, HIDDEN, BIAS)
    g_at += run * g_run + part * part_tokens * g_row
    up_at += run * up_run + part * part_tokens * up_row
    mine = tl.minimum(part_tokens, tokens - tl.program_id(1) * part_tokens)
    for token in range(0, mine, TOKENS):
        g = load_rows(g_at, token, mine, g_row, width, TOKENS, WIDTH)
        up = load_rows(up_at, token, mine, up_row, width, TOKENS, WIDTH)
        z_1 = tl.dot(rows_1, tl.trans(g)) + b_1[:, None]
        z_2 = z_1
        if PAIR:
            z_2 = tl.dot(rows_2, tl.trans(g)) + b_2[:, None]
        up_1, up_2 = z_1, z_2
        if OF_R:
            up_1 = tl.dot(back_rows_1, tl.trans(up))
            if PAIR:
                up_2 = tl.dot(back_rows_2, tl.trans(up))
        f_1, f_2, dz_1, dz_2 = forces_and_slopes(z_1, z_2, up_1, up_2, KIND, PAIR)
        if OF_BACK:
            dback_1 = tl.dot(f_1.to(g.dtype), up, dback_1)
            if PAIR:
                dback_2 = tl.dot(f_2.to(g.dtype), up, dback_2)
        if OF_R:
            dR_1 = tl.dot(dz_1.to(g.dtype), g, dR_1)
            if PAIR:
                dR_2 = tl.dot(dz_2.to(g.dtype), g, dR_2)
            if BIAS:
                db_1 += tl.sum(dz_1, 1)
                if PAIR:
                    db_2 += tl.sum(dz_2, 1)
    rows = 2 * hidden if PAIR else hidden
    place = part * part_stride + run * rows * width
    if OF_BACK:
        store_rows(dback_at + place, dback_1, unit, hidden, width, width, HIDDEN, WIDTH)
        if PAIR:
            half = place + hidden * width
            store_rows(dback_at + half, dback_2, unit, hidden, width, width, HIDDEN, WIDTH)
    if OF_R:
        store_rows(dR_at + place, dR_1, unit, hidden, width, width, HIDDEN, WIDTH)
        if PAIR:
            half = place + hidden * width
            store_rows(dR_at + half, dR_2, unit, hidden, width, width, HIDDEN, WIDTH)
        if BIAS:
            number = unit + tl.arange(0, HIDDEN)
            dbias_at += (part * tl.num_programs(2) + run) * rows + number
            tl.store(dbias_at, db_1, mask=number < hidden)
            if PAIR:
                tl.store(dbias_at + hidden, db_2, mask=number < hidden)


class Problem(NamedTuple):
    """The arguments of the operation, with neighbouring numbers in each row."""

    g: Tensor  # (runs, tokens, D)
    R: Tensor  # (runs, rows, D)
    bias: Tensor | None  # (runs, rows)
    back: Tensor  # (runs, rows, D)
    activation: str
    pair: bool

    @property
    def hidden(self) -> int:
        return self.R.shape[1] // 2 if self.pair else self.R.shape[1]

    def blocks(self, table: dict[int, Blocks]) -> Blocks:
        return table[max(32, triton.next_power_of_2(self.g.shape[2]))]

    def tensors(self) -> tuple[Tensor, ...]:
        bias = self.R if self.bias is None else self.bias  # which no kernel reads then
        return self.g, self.R, bias, self.back

    def sizes_and_strides(self) -> tuple[int, ...]:
        _, tokens, width = self.g.shape
        bias = 0 if self.bias is None else self.bias.stride(0)
        g, R, back = (x.stride()[:2] for x in (self.g, self.R, self.back))
        return tokens, width, self.hidden, *g, *R, bias, *back

    def options(self, blocks: Blocks) -> dict[str, Any]:
        return {
            "KIND": ACTIVATION[self.activation],
            "PAIR": self.pair,
            "BIAS": self.bias is not None,
            "TOKENS": blocks.tokens,
            "HIDDEN": blocks.hidden,
            "WIDTH": max(16, triton.next_power_of_2(self.g.shape[2])),
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        }


def make_problem(
    g: Tensor, R: Tensor, bias: Tensor | None, back: Tensor, activation: str, pair: bool
) -> Problem:
    bias = None if bias is None else in_rows(bias)
    return Problem(in_rows(g), in_rows(R), bias, in_rows(back), activation, pair)


def in_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def launch_forward(problem: Problem) -> Tensor:
    runs, tokens, _ = problem.g.shape
    blocks = problem.blocks(FORWARD)
    out = torch.empty(problem.g.shape, dtype=problem.g.dtype, device=problem.g.device)
    forward_kernel[(triton.cdiv(tokens, blocks.tokens), runs)](
        *problem.tensors(), out, *problem.sizes_and_strides(), **problem.options(blocks)
    )
    return out


def launch_backward(
    problem: Problem, upstream: Tensor, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of g and, to ``keep``, the force and the gradient of z, (runs, tokens, rows)."""
    runs, tokens, _ = problem.g.shape
    blocks = problem.blocks(BACKWARD)
    dg = torch.empty(problem.g.shape, dtype=problem.g.dtype, device=problem.g.device)
    f = dz = dg
    if keep:
        f = dg.new_empty(runs, tokens, problem.R.shape[1])
        dz = torch.empty_like(f)
    backward_kernel[(triton.cdiv(tokens, blocks.tokens), runs)](
        *problem.tensors(), upstream, dg, f, dz,
        *problem.sizes_and_strides(), upstream.stride(0), upstream.stride(1),
        KEEP=keep, **problem.options(blocks),
    )  # fmt: skip
    return dg, f, dz


def launch_weights(problem: Problem, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of R and back, (2, runs, rows, D), and of the bias."""
    runs, tokens, width = problem.g.shape
    rows = problem.R.shape[1]
    blocks = problem.blocks(WEIGHTS)
    units = triton.cdiv(problem.hidden, blocks.hidden)
    parts = max(1, PROGRAMS // (units * runs))
    part_tokens = triton.cdiv(triton.cdiv(tokens, parts), blocks.tokens) * blocks.tokens
    parts = triton.cdiv(tokens, part_tokens)
    partial_sums = torch.float32 if parts > 1 else problem.g.dtype
    dweights = problem.g.new_empty(parts, 2, runs, rows, width, dtype=partial_sums)
    dbias = problem.g.new_empty(
        parts, runs, 0 if problem.bias is None else rows, dtype=partial_sums
    )
    for of_R, of_back in ((True, True),) if width <= TOGETHER else ((True, False), (False, True)):
        weights_kernel[(units, parts, runs)](
            *problem.tensors(), upstream, dweights[0, 0], dweights[0, 1], dbias,
            *problem.sizes_and_strides(), upstream.stride(0), upstream.stride(1),
            part_tokens, dweights.stride(0), OF_R=of_R, OF_BACK=of_back, **problem.options(blocks),
        )  # fmt: skip
    if parts == 1:
        return dweights[0], dbias[0]
    return dweights.sum(0).to(problem.g.dtype), dbias.sum(0).to(problem.g.dtype)


def products_of_kept(
    problem: Problem, upstream: Tensor, f: Tensor, dz: Tensor
) -> tuple[Tensor, Tensor]:
    """What ``launch_weights`` returns, from what ``launch_backward`` kept."""
    runs, rows, width = problem.R.shape
    dweights = f.new_empty(2, runs, rows, width)
    torch.bmm(dz.mT, problem.g, out=dweights[0])
    torch.bmm(f.mT, upstream, out=dweights[1])
    return dweights, dz.new_empty(runs, 0) if problem.bias is None else dz.sum(1)


@torch.library.custom_op("nrgpt::feedforward", mutates_args=())
def feedforward(
    g: Tensor, R: Tensor, bias: Tensor | None, back: Tensor, activation: str, pair: bool
) -> Tensor:
    """force(g R^T + bias) back, with the force of FF2W (``pair``) or FF1."""
    return launch_forward(make_problem(g, R, bias, back, activation, pair))


@torch.library.custom_op("nrgpt::feedforward_backward", mutates_args=())
def feedforward_backward(
    g: Tensor,
    R: Tensor,
    bias: Tensor | None,
    back: Tensor,
    upstream: Tensor,
    activation: str,
    pair: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of g, of R and back in one tensor, and of the bias (of no size, if none)."""
    problem = make_problem(g, R, bias, back, activation, pair)
    upstream = in_rows(upstream)
    dg, f, dz = launch_backward(problem, upstream, keep=KEEPS_HIDDEN)
    if KEEPS_HIDDEN:
        return dg, *products_of_kept(problem, upstream, f, dz)
    return dg, *launch_weights(problem, upstream)


@feedforward.register_fake
def _(
    g: Tensor, R: Tensor, bias: Tensor | None, back: Tensor, activation: str, pair: bool
) -> Tensor:
    return torch.empty(g.shape, dtype=g.dtype, device=g.device)


@feedforward_backward.register_fake
def _(
    g: Tensor,
    R: Tensor,
    bias: Tensor | None,
    back: Tensor,
    upstream: Tensor,
    activation: str,
    pair: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dg = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    rows = R.shape[1]
    return dg, g.new_empty(2, *R.shape), g.new_empty(len(R), 0 if bias is None else rows)


def backward_of_feedforward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    g, R, bias, back = ctx.saved_tensors
    dg, dweights, dbias = feedforward_backward(g, R, bias, back, upstream, ctx.activation, ctx.pair)
    dR, dback = dweights.unbind(0)
    return dg, dR, None if bias is None else dbias, dback, None, None


def backward_of_backward(
    ctx: Any, on_dg: Tensor, on_dweights: Tensor, on_dbias: Tensor
) -> tuple[Tensor | None, ...]:
    """For the few who differentiate twice: by the plain version."""

    def plain(g: Tensor, R: Tensor, bias: Tensor | None, back: Tensor) -> Tensor:
        return plain_feedforward(g, R, bias, back.mT, ctx.activation, ctx.pair)

    with torch.enable_grad():
        kept: list[Any] = [
            None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors
        ]
        *inputs, first = kept
        has_bias = inputs[2] is not None
        out = torch.vmap(plain, in_dims=(0, 0, 0 if has_bias else None, 0))(*inputs)
        there = [x for x in inputs if x is not None]
        gradients = torch.autograd.grad(out, there, first, create_graph=True)
        on_R, on_back = on_dweights.unbind(0)
        upstream = [on_dg, on_R, *([on_dbias] if has_bias else []), on_back]
        second = iter(torch.autograd.grad(gradients, [*there, first], upstream))
    return (*(None if x is None else next(second) for x in kept), None, None)


def by_run(info: Any, in_dims: Any, tensors: list[Any]) -> list[Any]:
    """The axis that vmap runs over and our own axis of runs, as one."""

    def merged(x: Tensor, dim: int | None) -> Tensor:
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    pairs = zip(tensors, in_dims[: len(tensors)], strict=True)
    return [None if x is None else merged(x, dim).flatten(0, 1) for x, dim in pairs]


@feedforward.register_vmap
def _(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
    *tensors, activation, pair = arguments
    out = feedforward(*by_run(info, in_dims, tensors), activation, pair)
    return out.unflatten(0, (info.batch_size, -1)), 0


@feedforward_backward.register_vmap
def _(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    *tensors, activation, pair = arguments
    gradients = feedforward_backward(*by_run(info, in_dims, tensors), activation, pair)
    axes = (0, 1, 0)
    split = (x.unflatten(a, (info.batch_size, -1)) for x, a in zip(gradients, axes, strict=True))
    return tuple(split), axes


feedforward.register_autograd(backward_of_feedforward, setup_context=keep_arguments)
feedforward_backward.register_autograd(backward_of_backward, setup_context=keep_arguments)
