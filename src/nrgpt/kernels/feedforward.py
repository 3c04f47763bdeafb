"""Forces of the feed-forward energies: an activation, its slope and a product, in one go.

    pair_force(z)    z = (z_1, z_2):  (sigma'(z_1) z_2, sigma(z_1))      FF2W
    square_force(z)                   2 sigma(z) sigma'(z)               FF1

Their backward passes ask for sigma''. PyTorch has a kernel for each factor; here one kernel reads z
once and writes the result once.

``feedforward`` is all that a step asks of such an energy, the products before and after the force
included. In small models the hidden layer's way to memory and back costs more than the products: a
kernel that never writes it down is chosen there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import choose, choose_feedforward
from .pointwise import ACTIVATIONS


def plain_pair_force(z: Tensor, activation: str) -> Tensor:
    sigma = ACTIVATIONS[activation]
    z_1, z_2 = z.chunk(2, dim=-1)
    return torch.cat([sigma.pull(z_2, z_1), sigma.value(z_1)], dim=-1)


def plain_square_force(z: Tensor, activation: str) -> Tensor:
    sigma = ACTIVATIONS[activation]
    return sigma.pull(2 * sigma.value(z), z)


def pair_force(z: Tensor, activation: str) -> Tensor:
    if not choose(z, batches=True).fused:
        return plain_pair_force(z, activation)
    from .triton_force import force

    return force(z, activation, True)


def square_force(z: Tensor, activation: str) -> Tensor:
    if not choose(z, batches=True).fused:
        return plain_square_force(z, activation)
    from .triton_force import force

    return force(z, activation, False)


def force_beside(left: Tensor, z: Tensor, activation: str, *, pair: bool) -> Tensor:
    """``left`` and the force of z, side by side."""
    if not z.requires_grad and not left.requires_grad and choose(z).fused and left.dtype == z.dtype:
        from .triton_force import launch_force

        return launch_force(z, None, activation, pair, left)
    force = pair_force if pair else square_force
    return torch.cat([left, force(z, activation)], dim=-1)


def plain_feedforward(
    g: Tensor, R: Tensor, bias: Tensor | None, write: Tensor, activation: str, pair: bool
) -> Tensor:
    force = plain_pair_force if pair else plain_square_force
    return F.linear(force(F.linear(g, R, bias), activation), write)


def feedforward(
    g: Tensor,
    R: Tensor,
    bias: Tensor | None,
    write: Tensor,
    field: Tensor | None,
    activation: str,
    *,
    pair: bool,
) -> Tensor:
    """write force(R g + bias) + field, for g of shape (..., tokens, D)."""
    if not choose_feedforward(g).fused:
        force = pair_force if pair else square_force
        return F.linear(force(F.linear(g, R, bias), activation), write, field)
    from .triton_feedforward import feedforward as fused

    one_run = (g.reshape(1, -1, g.shape[-1]), R[None], write.mT.contiguous()[None])
    g_, R_, back = (x.to(torch.bfloat16) for x in one_run)
    bias_ = None if bias is None else bias[None].to(torch.bfloat16)
    out = fused(g_, R_, bias_, back, activation, pair).view(g.shape)
    return out if field is None else out + field.to(out.dtype)
