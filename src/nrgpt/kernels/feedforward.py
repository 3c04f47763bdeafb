"""Forces of the feed-forward energies.

    pair_force(z)    z = (z_1, z_2):  (sigma'(z_1) z_2, sigma(z_1))      FF2W
    square_force(z)                   2 sigma(z) sigma'(z)               FF1

Their backward passes need sigma''. PyTorch has one kernel for each factor; ours reads z once and
writes the result once.

``feedforward`` also does the products before and after the force. In small models, writing the
hidden layer to memory costs more than the products.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .dispatch import choose
from .plain import plain_pair_force, plain_square_force


def pair_force(z: Tensor, activation: str) -> Tensor:
    return elementwise(choose(z, batches=True).fused, pair=True)(z, activation)


def square_force(z: Tensor, activation: str) -> Tensor:
    return elementwise(choose(z, batches=True).fused, pair=False)(z, activation)


def elementwise(fused: bool, *, pair: bool) -> Callable[[Tensor, str], Tensor]:
    """The force of z, by one fused kernel or by PyTorch's own."""
    if not fused:
        return plain_pair_force if pair else plain_square_force
    from .triton_force import force

    return partial(force, pair=pair)


def force_beside(left: Tensor | None, z: Tensor, activation: str, *, pair: bool) -> Tensor:
    """The force of z to the right of ``left``, if given, by a kernel that has no backward pass."""
    if z.requires_grad or (left is not None and left.dtype != z.dtype):
        force = elementwise(True, pair=pair)(z, activation)
        return force if left is None else torch.cat([left, force], dim=-1)
    from .triton_force import launch_force

    return launch_force(z, None, activation, pair, left)


def feedforward(
    g: Tensor,
    read: Tensor,
    bias: Tensor | None,
    back: Tensor,
    field: Tensor | None,
    activation: str,
    *,
    pair: bool,
) -> Tensor:
    """back force(read g + bias) + field, for g of shape (..., tokens, D), by a kernel for small
    widths that never writes the hidden layer to memory."""
    from .triton_feedforward import feedforward as fused

    one_run = (g.reshape(1, -1, g.shape[-1]), read[None], back.mT.contiguous()[None])
    g_, read_, back_ = (x.to(torch.bfloat16) for x in one_run)
    bias_ = None if bias is None else bias[None].to(torch.bfloat16)
    out = fused(g_, read_, bias_, back_, activation, pair).view(g.shape)
    return out if field is None else out + field.to(out.dtype)
