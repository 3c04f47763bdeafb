"""Activations sigma with their derivatives, and potentials F with F' = sigma, elementwise.

An activation's derivative is only needed as a factor, so it comes as ``pull(v, z) = v sigma'(z)``:
one call of PyTorch's own backward kernel, which is itself differentiable, as training through a
force requires.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Elementwise = Callable[[Tensor], Tensor]


class Bends(NamedTuple):
    """How far a smooth sigma bends, anywhere."""

    least_slope: float
    largest_slope: float
    bend: float
    """The largest |sigma''|."""
    square: float
    """How far (sigma^2)'' goes below zero."""


class Activation(NamedTuple):
    value: Elementwise
    pull: Callable[[Tensor, Tensor], Tensor]
    bends: Bends | None = None
    """None where the slope jumps."""


ACTIVATIONS = {
    "gelu": Activation(
        F.gelu, torch.ops.aten.gelu_backward, Bends(-0.12891, 1.12891, 0.79789, 0.16881)
    ),
    "gelu_tanh": Activation(
        lambda z: F.gelu(z, approximate="tanh"),
        lambda v, z: torch.ops.aten.gelu_backward(v, z, approximate="tanh"),
        Bends(-0.12900, 1.12900, 0.79789, 0.16857),
    ),
    "relu": Activation(F.relu, lambda v, z: torch.ops.aten.threshold_backward(v, z, 0)),
}


class Potential(NamedTuple):
    value: Elementwise
    derivative: Elementwise
    concave_by: float = 0.0
    """How far F'' goes below zero: 0 for a convex F."""


def gelu_integral(z: Tensor) -> Tensor:
    """F with F' = GELU and F(-inf) = 0: ((z^2 - 1) Phi(z) + z phi(z)) / 2."""
    Phi = torch.special.ndtr(z)
    phi = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return 0.5 * ((z.square() - 1) * Phi + z * phi)


def softplus(z: Tensor) -> Tensor:
    """log(1 + e^z), whose slope is the sigmoid everywhere. (F.softplus is z beyond 20.)"""
    return torch.logaddexp(z, torch.zeros_like(z))


POTENTIALS = {
    "relu2": Potential(lambda z: 0.5 * F.relu(z).square(), F.relu),
    # GELU falls where z < -0.75, so its integral is not convex.
    "gelu": Potential(gelu_integral, F.gelu, concave_by=0.12891),
    "softplus": Potential(softplus, torch.sigmoid),
    # A smooth relu2.
    "softplus2": Potential(
        lambda z: 0.5 * softplus(z).square(),
        lambda z: softplus(z) * torch.sigmoid(z),
    ),
}
