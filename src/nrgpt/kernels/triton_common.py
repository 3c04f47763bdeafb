# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What the Triton kernels share. They are imported only if ``dispatch`` has chosen them."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

ACTIVATION = {"relu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def load_rows(at, first, count, stride, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a matrix from ``first`` on; zeros beyond its end."""
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


def in_rows(x: Tensor) -> Tensor:
    """With contiguous rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def by_run(info: Any, in_dims: Any, tensors: list[Any]) -> list[Any]:
    """The axis that vmap runs over and our own axis of runs, merged."""

    def merged(x: Tensor, dim: int | None) -> Tensor:
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    pairs = zip(tensors, in_dims[: len(tensors)], strict=True)
    return [None if x is None else merged(x, dim).flatten(0, 1) for x, dim in pairs]


def keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation, ctx.pair = inputs
    ctx.save_for_backward(*tensors)
