"""Forces of the feed-forward energies: an activation, its slope and a product, in one go.

    pair_force(z)    z = (z_1, z_2):  (sigma'(z_1) z_2, sigma(z_1))      FF2W
    square_force(z)                   2 sigma(z) sigma'(z)               FF1

Their backward passes ask for sigma''. PyTorch has a kernel for each factor; here one kernel reads z
once and writes the result once.
"""

from typing import Any

import torch
from torch import Tensor

from .dispatch import choose
from .pointwise import ACTIVATIONS


def plain_pair_force(z: Tensor, activation: str) -> Tensor:
    sigma = ACTIVATIONS[activation]
    z_1, z_2 = z.chunk(2, dim=-1)
    return torch.cat([sigma.pull(z_2, z_1), sigma.value(z_1)], dim=-1)


def plain_square_force(z: Tensor, activation: str) -> Tensor:
    sigma = ACTIVATIONS[activation]
    return sigma.pull(2 * sigma.value(z), z)


def pair_force(z: Tensor, activation: str) -> Tensor:
    if choose(z).fused:
        return FusedForce.apply(z, activation, True)
    return plain_pair_force(z, activation)


def square_force(z: Tensor, activation: str) -> Tensor:
    if choose(z).fused:
        return FusedForce.apply(z, activation, False)
    return plain_square_force(z, activation)


class FusedForce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: str, pair: bool) -> Tensor:
        from .triton_kernels import force

        ctx.save_for_backward(z)
        ctx.activation, ctx.pair = activation, pair
        return force(z, None, activation, pair)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        from .triton_kernels import force

        (z,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody will differentiate again
            plain = plain_pair_force if ctx.pair else plain_square_force
            (gradient,) = torch.autograd.grad(
                plain(z, ctx.activation), z, upstream, create_graph=True
            )
            return gradient, None, None
        return force(z, upstream, ctx.activation, ctx.pair), None, None
