"""Feed-forward energies: each acts on one token alone.

The optional learnable ``feedforward_scale`` s multiplies the whole energy.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.feedforward import feedforward, force_beside, pair_force, square_force
from ...kernels.pointwise import ACTIVATIONS, POTENTIALS
from ..certificate import Finding, Guarantee
from ..init import blank
from .term import EnergyTerm, Readout

if TYPE_CHECKING:
    from ..config import ModelConfig


class FeedForwardEnergy(EnergyTerm):
    """What the four energies share: sigma, the optional scale, and their certificate."""

    feedforward_scale: Tensor | None

    def __init__(self, cfg: "ModelConfig"):
        super().__init__()
        self.activation = cfg.activation
        self.sigma = ACTIVATIONS[cfg.activation]
        self.feedforward_scale = blank(1) if cfg.feedforward_scale else None

    def scaled(self, value: Tensor) -> Tensor:
        if self.feedforward_scale is None:
            return value
        return self.feedforward_scale.to(value.dtype) * value

    def finding(self, is_concave: bool, because: str) -> Finding:
        name = type(self).__name__
        if self.feedforward_scale is not None and not self.feedforward_scale.item() >= 0:
            return Finding(name, Guarantee.SMALL_STEPS, "not concave: it lacks a scale >= 0")
        level = Guarantee.EVERY_STEP if is_concave else Guarantee.SMALL_STEPS
        return Finding(name, level, because)


class KnownForce(FeedForwardEnergy):
    """What FF1 and FF2W share: kernels that know their force."""

    pair: bool
    """Whether z is two read-outs, z_1 and z_2 side by side."""

    def force(self, z: Tensor, keys: Tensor | None) -> Tensor:
        return self.scaled((pair_force if self.pair else square_force)(z, self.activation))

    @property
    def is_known(self) -> bool:
        """A subclass may have a force of its own."""
        mine = type(self)
        return mine.force is KnownForce.force and mine.bare_force is EnergyTerm.bare_force

    def update(self, g: Tensor, readout: Readout, write: Tensor, field: Tensor | None) -> Tensor:
        R, b, _ = readout
        if R is None or not self.is_known:
            return super().update(g, readout, write, field)
        return feedforward(g, R, b, self.scaled(write), field, self.activation, pair=self.pair)

    def bare_force_beside(self, left: Tensor, z: Tensor, keys: Tensor | None) -> Tensor:
        if self.feedforward_scale is not None or not self.is_known:
            return super().bare_force_beside(left, z, keys)
        return force_beside(left, z, self.activation, pair=self.pair)


class FF1(KnownForce):
    """E = -||sigma(z)||^2, z = W g + b. Paper: NRGPT_H_FF1.

    -dE/dz = 2 sigma(z) sigma'(z). The paper calls this the same as DenseMemory with F' = sigma;
    it is that with F = sigma^2, so F' = 2 sigma sigma'. With ReLU, F is convex and E concave;
    with GELU it is not (F'' < 0 for some z < 0), and a step may raise E, though with many hidden
    units of random weights it hardly ever does.
    """

    pair = False

    def __init__(self, cfg: "ModelConfig"):
        super().__init__(cfg)
        self.is_convex = cfg.activation == "relu"
        self.W = blank(cfg.hidden, cfg.width)
        self.b = blank(cfg.hidden) if cfg.bias else None

    def readout(self) -> Readout:
        return Readout(self.W, self.b)

    def energy(self, z: Tensor, keys: Tensor | None) -> Tensor:
        return self.scaled(-self.sigma.value(z).square().sum(-1))

    def guarantee(self) -> Finding:
        if self.is_convex:
            return self.finding(True, "concave: ReLU^2 is convex")
        return self.finding(False, "GELU^2 is not convex")


class FF2W(KnownForce):
    """E = -g . (W_2 sigma(W_1 g + b_1) + b_2). Paper: NRGPT_H_FF2W, eq. E_FF2W.

    Read out z_1 = W_1 g + b_1 and z_2 = W_2^T g: then E = -z_2 . sigma(z_1) - b_2 . g, and

        -dE/dz_1 = sigma'(z_1) z_2,    -dE/dz_2 = sigma(z_1),

    so -dE/dg = W_2 sigma(z_1) + b_2 + W_1^T (sigma'(z_1) W_2^T g): a transformer's feed-forward
    part, and a second one that makes it a gradient. The paper prints that with the wrong sign
    and a stray sigma. A product of two read-outs is not concave.
    """

    pair = True

    def __init__(self, cfg: "ModelConfig"):
        super().__init__(cfg)
        self.W_1 = blank(cfg.hidden, cfg.width)
        self.W_2 = blank(cfg.width, cfg.hidden)
        self.b_1 = blank(cfg.hidden) if cfg.bias else None
        self.b_2 = blank(cfg.width) if cfg.bias else None

    def readout(self) -> Readout:
        R = torch.cat([self.W_1, self.W_2.T])
        if self.b_1 is None or self.b_2 is None:
            return Readout(R)
        return Readout(R, torch.cat([self.b_1, torch.zeros_like(self.b_1)]), self.scaled(self.b_2))

    def energy(self, z: Tensor, keys: Tensor | None) -> Tensor:
        z_1, z_2 = z.chunk(2, dim=-1)
        return self.scaled(-(z_2 * self.sigma.value(z_1)).sum(-1))

    def guarantee(self) -> Finding:
        return self.finding(False, "a product of two read-outs is not concave")


class FF2(FeedForwardEnergy):
    """E = -||sigma(u)||^2, u = W_2 sigma(z) + b_2, z = W_1 g + b_1; W_1 is D x D.

    The deeper variant that the paper mentions as "residual" and the released code calls
    NRGPT_H_FF2. -dE/dz = sigma'(z) W_2^T (2 sigma(u) sigma'(u)).
    """

    def __init__(self, cfg: "ModelConfig"):
        super().__init__(cfg)
        self.W_1 = blank(cfg.width, cfg.width)
        self.W_2 = blank(cfg.hidden, cfg.width)
        self.b_1 = blank(cfg.width) if cfg.bias else None
        self.b_2 = blank(cfg.hidden) if cfg.bias else None

    def readout(self) -> Readout:
        return Readout(self.W_1, self.b_1)

    def second_layer(self, z: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.sigma.value(z), self.W_2, self.b_2)

    def energy(self, z: Tensor, keys: Tensor | None) -> Tensor:
        return self.scaled(-self.sigma.value(self.second_layer(z)).square().sum(-1))

    def force(self, z: Tensor, keys: Tensor | None) -> Tensor:
        u = self.second_layer(z)
        on_u = self.sigma.pull(2 * self.sigma.value(u), u)
        return self.scaled(self.sigma.pull(on_u @ self.W_2, z))

    def guarantee(self) -> Finding:
        return self.finding(False, "two layers of activations are not concave")


class DenseMemory(FeedForwardEnergy):
    """E = -sum F(z), z = W g + b: a dense associative memory, paper eq. E-FF.

    -dE/dz = F'(z) = sigma(z). F is ``potential``: relu2 (ReLU^2 / 2, whose force is the ReLU
    feed-forward of a transformer), gelu (the exact integral of GELU), softplus, softplus2
    (softplus^2 / 2). Where F is convex, E is concave.
    """

    def __init__(self, cfg: "ModelConfig"):
        super().__init__(cfg)
        self.potential = cfg.potential
        self.W = blank(cfg.hidden, cfg.width)
        self.b = blank(cfg.hidden) if cfg.bias else None

    def readout(self) -> Readout:
        return Readout(self.W, self.b)

    def energy(self, z: Tensor, keys: Tensor | None) -> Tensor:
        return self.scaled(-POTENTIALS[self.potential].value(z).sum(-1))

    def force(self, z: Tensor, keys: Tensor | None) -> Tensor:
        return self.scaled(POTENTIALS[self.potential].derivative(z))

    def guarantee(self) -> Finding:
        if POTENTIALS[self.potential].convex:
            return self.finding(True, f"concave: its potential {self.potential} is convex")
        return self.finding(False, f"its potential {self.potential} is not convex")


FEEDFORWARD: dict[str, Callable[["ModelConfig"], EnergyTerm]] = {
    "ff1": FF1,
    "ff2w": FF2W,
    "ff2": FF2,
    "memory": DenseMemory,
}
"""Feed-forward energies by the name that ModelConfig.feedforward knows them by; add your own."""
