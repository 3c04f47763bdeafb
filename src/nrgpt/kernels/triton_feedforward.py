# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The feed-forward part of a step as Triton kernels, for small widths. Imported only if
``dispatch`` has chosen them.

The forward pass never writes the hidden layer to memory: each program holds some tokens and goes
through the hidden units block by block. The backward pass computes z again and writes the force and
the gradient of z once; ordinary products then give the gradients of the weights. (A kernel that
computed those too, and wrote nothing else, was slower.)

All tensors begin with an axis of runs, (runs, tokens, D) and (runs, rows of R, D), so that packed
runs share one launch. ``back`` is the transpose of the step's eta write^T: like R, it has a row of
length D for each row of z.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .plain import plain_feedforward
from .triton_common import (
    ACTIVATION,
    activation_and_slopes,
    by_run,
    in_rows,
    keep_arguments,
    load_rows,
    store_rows,
)


class Blocks(NamedTuple):
    tokens: int
    hidden: int
    warps: int
    stages: int


FORWARD = {32: Blocks(64, 32, 4, 3), 64: Blocks(64, 32, 4, 3), 128: Blocks(64, 32, 4, 3)}
BACKWARD = {32: Blocks(64, 32, 4, 3), 64: Blocks(64, 32, 4, 3), 128: Blocks(64, 32, 4, 2)}
"""Block sizes of the two kernels by width, rounded up; for 64 and 128 the fastest of those tried on
an H200."""


@triton.jit
def load_bias(at, first, count, ROWS: tl.constexpr, BIAS: tl.constexpr):
    if BIAS:
        row = first + tl.arange(0, ROWS)
        return tl.load(at + row, mask=row < count, other=0.0).to(tl.float32)
    else:
        return tl.zeros([ROWS], tl.float32)


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
    KIND: tl.constexpr, PAIR: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of g, the force, and the gradient of z. One program: some tokens of one run."""
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
        left = hidden - unit
        store_rows(f_at + unit, f_1, first, tokens, kept_row, left, TOKENS, HIDDEN)
        store_rows(dz_at + unit, dz_1, first, tokens, kept_row, left, TOKENS, HIDDEN)
        if PAIR:
            place = hidden + unit
            store_rows(f_at + place, f_2, first, tokens, kept_row, left, TOKENS, HIDDEN)
            store_rows(dz_at + place, dz_2, first, tokens, kept_row, left, TOKENS, HIDDEN)
    store_rows(dg_at + run * tokens * width, dg, first, tokens, width, width, TOKENS, WIDTH)


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


def launch_forward(problem: Problem) -> Tensor:
    runs, tokens, _ = problem.g.shape
    blocks = problem.blocks(FORWARD)
    out = torch.empty(problem.g.shape, dtype=problem.g.dtype, device=problem.g.device)
    with torch.cuda.device_of(out):
        forward_kernel[(triton.cdiv(tokens, blocks.tokens), runs)](
            *problem.tensors(), out, *problem.sizes_and_strides(), **problem.options(blocks)
        )
    return out


def launch_backward(problem: Problem, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of g, the force, and the gradient of z, (runs, tokens, rows)."""
    runs, tokens, _ = problem.g.shape
    blocks = problem.blocks(BACKWARD)
    dg = torch.empty(problem.g.shape, dtype=problem.g.dtype, device=problem.g.device)
    f = dg.new_empty(runs, tokens, problem.R.shape[1])
    dz = torch.empty_like(f)
    with torch.cuda.device_of(dg):
        backward_kernel[(triton.cdiv(tokens, blocks.tokens), runs)](
            *problem.tensors(), upstream, dg, f, dz,
            *problem.sizes_and_strides(), upstream.stride(0), upstream.stride(1),
            **problem.options(blocks),
        )  # fmt: skip
    return dg, f, dz


def weight_gradients(problem: Problem, upstream: Tensor, f: Tensor, dz: Tensor) -> Tensor:
    """The gradients of R and back, (2, runs, rows, D)."""
    dweights = f.new_empty(2, *problem.R.shape)
    for out, left, right in ((dweights[0], dz, problem.g), (dweights[1], f, upstream)):
        if len(left) == 1:  # where the library splits the long sum over tokens
            torch.mm(left[0].mT, right[0], out=out[0])
        else:
            torch.bmm(left.mT, right, out=out)
    return dweights


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
    dg, f, dz = launch_backward(problem, upstream)
    dbias = dz.new_empty(len(dz), 0) if bias is None else dz.sum(1)
    return dg, weight_gradients(problem, upstream, f, dz), dbias


@feedforward.register_fake
def _(g: Tensor, *others: Any) -> Tensor:
    return torch.empty(g.shape, dtype=g.dtype, device=g.device)


@feedforward_backward.register_fake
def _(g: Tensor, R: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
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
    """Second derivatives, which are rare: by the plain version."""

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
