"""Forces of the feed-forward energies: an activation, its slope and a product, in one go.

    pair_force(z)    z = (z_1, z_2):  (sigma'(z_1) z_2, sigma(z_1))      FF2W
    square_force(z)                   2 sigma(z) sigma'(z)               FF1

Their backward passes ask for sigma''. PyTorch has a kernel for each factor; here one kernel reads z
once and writes the result once.
"""

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
    if not choose(z, batches=True).fused:
        return plain_pair_force(z, activation)
    from .triton_kernels import force

    return force(z, activation, True)


def square_force(z: Tensor, activation: str) -> Tensor:
    if not choose(z, batches=True).fused:
        return plain_square_force(z, activation)
    from .triton_kernels import force

    return force(z, activation, False)
