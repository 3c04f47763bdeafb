"""Feed-forward energies: each acts on one token alone.

The optional learnable ``feedforward_scale`` s multiplies the whole energy.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.feedforward import pair_force, square_force
from ...kernels.pointwise import ACTIVATIONS, POTENTIALS, Activation, Potential
from ..certificate import Finding, Guarantee
from ..config import ModelConfig
from ..curvature import bilinear_norms, largest_eigenvalue
from ..init import normal, ones, parameter, softplus_root, zeros
from ..norm import Norm
from ..past import Past
from .term import EnergyTerm, Readout


class FeedForwardEnergy(EnergyTerm):
    """What the four energies share: sigma, the optional scale, and their certificate."""

    feedforward_scale: Tensor | None

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.width, self.activation = cfg.width, cfg.activation
        self.feedforward_scale = parameter(1, start=ones) if cfg.feedforward_scale else None
        self.driven = cfg.drive

    def make_drive(self, rows: int) -> None:
        """Call this where z has been given its rows."""
        if self.driven:
            self.W_drive = parameter(rows, self.width, start=normal, muon="matrix")

    @property
    def sigma(self) -> Activation:
        return ACTIVATIONS[self.activation]

    def scaled(self, value: Tensor) -> Tensor:
        if self.feedforward_scale is None:
            return value
        return self.feedforward_scale.to(value.dtype) * value

    def scaled_readout(
        self, read: Tensor, bias: Tensor | None, field: Tensor | None = None
    ) -> Readout:
        """The scale is part of the way back."""
        write = None if self.feedforward_scale is None else self.scaled(read)
        field = None if field is None else self.scaled(field)
        return Readout(read, bias, write, field, self.W_drive if self.driven else None)

    def scaled_bound(self, bound: Tensor) -> Tensor:
        return self.scaled(bound).abs().sum()

    def finding(self, is_concave: bool, because: str) -> Finding:
        name = type(self).__name__
        if self.feedforward_scale is not None and not self.feedforward_scale.item() >= 0:
            return Finding(name, Guarantee.SMALL_STEPS, "not concave: it lacks a scale >= 0")
        level = Guarantee.EVERY_STEP if is_concave else Guarantee.SMALL_STEPS
        return Finding(name, level, because)


class FF1(FeedForwardEnergy):
    """E = -||sigma(z)||^2, z = W g + b. Paper: NRGPT_H_FF1.

    -dE/dz = 2 sigma(z) sigma'(z). The paper calls this the same as DenseMemory with F' = sigma;
    it is that with F = sigma^2, so F' = 2 sigma sigma'. With ReLU, F is convex and E concave;
    with GELU it is not (F'' < 0 for some z < 0), and a step may raise E, though with many hidden
    units of random weights it hardly ever does.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.is_convex = cfg.activation == "relu"
        self.W = parameter(cfg.hidden, cfg.width, start=normal, muon="matrix")
        self.b = parameter(cfg.hidden, start=zeros) if cfg.bias else None
        self.make_drive(cfg.hidden)

    def readout(self) -> Readout:
        return self.scaled_readout(self.W, self.b)

    def energy(self, z: Tensor, past: Past) -> Tensor:
        return self.scaled(-self.sigma.value(z).square().sum(-1))

    def force(self, z: Tensor, past: Past) -> Tensor:
        return square_force(z, self.activation)

    def curvature(self, norm: Norm) -> Tensor | None:
        """The Hessian is -W^T diag((sigma^2)'') W, and (sigma^2)'' >= -c: L = c |W Gamma|^2."""
        bends = self.sigma.bends
        if bends is None:
            return None
        M = norm.through(self.W)
        return self.scaled_bound(bends.square * largest_eigenvalue(M.mT @ M))

    def guarantee(self) -> Finding:
        if self.is_convex:
            return self.finding(True, "concave: ReLU^2 is convex")
        return self.finding(False, "GELU^2 is not convex")


class FF2W(FeedForwardEnergy):
    """E = -g . (W_2 sigma(W_1 g + b_1) + b_2). Paper: NRGPT_H_FF2W, eq. E_FF2W.

    Read out z_1 = W_1 g + b_1 and z_2 = W_2^T g: then E = -z_2 . sigma(z_1) - b_2 . g, and

        -dE/dz_1 = sigma'(z_1) z_2,    -dE/dz_2 = sigma(z_1),

    so -dE/dg = W_2 sigma(z_1) + b_2 + W_1^T (sigma'(z_1) W_2^T g): a transformer's feed-forward
    part, and a second one that makes it a gradient. The paper prints that with the wrong sign
    and a stray sigma. A product of two readouts is not concave.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.W_1 = parameter(cfg.hidden, cfg.width, start=normal, muon="matrix")
        self.W_2 = parameter(cfg.width, cfg.hidden, start=normal, muon="matrix")
        self.b_1 = parameter(cfg.hidden, start=zeros) if cfg.bias else None
        self.b_2 = parameter(cfg.width, start=zeros) if cfg.bias else None
        self.make_drive(cfg.hidden)

    def readout(self) -> Readout:
        read, bias = torch.cat([self.W_1, self.W_2.T]), None
        if self.b_1 is not None:
            bias = torch.cat([self.b_1, torch.zeros_like(self.b_1)])
        readout = self.scaled_readout(read, bias, self.b_2)
        if not self.driven:
            return readout
        drive = torch.cat([self.W_drive, torch.zeros_like(self.W_drive)])  # of z_1 alone
        return readout._replace(drive=drive)

    def energy(self, z: Tensor, past: Past) -> Tensor:
        z_1, z_2 = z.chunk(2, dim=-1)
        return self.scaled(-(z_2 * self.sigma.value(z_1)).sum(-1))

    def force(self, z: Tensor, past: Past) -> Tensor:
        return pair_force(z, self.activation)

    def curvature(self, norm: Norm) -> Tensor | None:
        """With M_1 = W_1 Gamma and M_2 = W_2^T Gamma, and s = sigma'(z_1), the Hessian of E is

            -(M_2^T diag(s) M_1 + its transpose) - M_1^T diag(sigma''(z_1) z_2) M_1.

        s lies within r of a middle value m. The middle gives m |M_2^T M_1 + M_1^T M_2|; the rest,
        by 2 a b <= t a^2 + b^2 / t, at most r (t M_1^T M_1 + M_2^T M_2 / t). Last, |z_2| is at most
        sqrt(D) |row of M_2| + |its part of delta|: there is no bound without a norm.
        """
        bends = self.sigma.bends
        if bends is None or norm.gamma is None:
            return None
        M_1, M_2 = norm.through(self.W_1), norm.through(self.W_2.T)
        middle = (bends.largest_slope + bends.least_slope) / 2
        apart = (bends.largest_slope - bends.least_slope) / 2
        t = M_2.norm() / M_1.norm().clamp(min=torch.finfo(M_1.dtype).tiny)
        t = t.clamp(1e-6, 1e6)
        z_2 = self.width**0.5 * M_2.norm(dim=-1, keepdim=True)
        if norm.offset is not None:
            z_2 = z_2 + (self.W_2.T @ norm.offset).abs()[:, None]
        rest = M_1.mT @ ((apart * t + bends.bend * z_2) * M_1) + apart / t * (M_2.mT @ M_2)
        return self.scaled_bound(middle * bilinear_norms(M_2, M_1) + largest_eigenvalue(rest))

    def guarantee(self) -> Finding:
        return self.finding(False, "a product of two readouts is not concave")


class FF2(FeedForwardEnergy):
    """E = -||sigma(u)||^2, u = W_2 sigma(z) + b_2, z = W_1 g + b_1; W_1 is D x D.

    The deeper variant that the paper mentions as "residual" and the released code calls
    NRGPT_H_FF2. -dE/dz = sigma'(z) W_2^T (2 sigma(u) sigma'(u)).
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.W_1 = parameter(cfg.width, cfg.width, start=normal, muon="matrix")
        self.W_2 = parameter(cfg.hidden, cfg.width, start=normal, muon="matrix")
        self.b_1 = parameter(cfg.width, start=zeros) if cfg.bias else None
        self.b_2 = parameter(cfg.hidden, start=zeros) if cfg.bias else None
        self.make_drive(cfg.width)

    def readout(self) -> Readout:
        return self.scaled_readout(self.W_1, self.b_1)

    def second_layer(self, z: Tensor) -> Tensor:
        return F.linear(self.sigma.value(z), self.W_2, self.b_2)

    def energy(self, z: Tensor, past: Past) -> Tensor:
        return self.scaled(-self.sigma.value(self.second_layer(z)).square().sum(-1))

    def force(self, z: Tensor, past: Past) -> Tensor:
        on_u = square_force(self.second_layer(z), self.activation)
        return self.sigma.pull(on_u @ self.W_2, z)

    def guarantee(self) -> Finding:
        return self.finding(False, "two layers of activations are not concave")


class DenseMemory(FeedForwardEnergy):
    """E = -sum_j w_j F(z_j), z = W g + b: a dense associative memory, paper eq. E-FF (w = 1).

    -dE/dz = w F'(z). F is ``potential``: relu2 (ReLU^2 / 2, whose force is the ReLU feed-forward
    of a transformer), gelu (the exact integral of GELU), softplus, softplus2 (softplus^2 / 2).
    Where F is convex and w >= 0, E is concave.

    With ``write="free"`` tokens move by W_2 sigma(z), as in a transformer, and the energy's weights
    w >= 0 are learned: they say which hidden units count. Without a cone nothing asks for the
    energy while training, and they stay at 1.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.name = cfg.potential
        self.free = cfg.write == "free"
        self.W = parameter(cfg.hidden, cfg.width, start=normal, muon="matrix")
        self.b = parameter(cfg.hidden, start=zeros) if cfg.bias else None
        self.make_drive(cfg.hidden)
        if self.free:
            learn = cfg.safeguard == "cone"
            self.W_2 = parameter(cfg.width, cfg.hidden, start=normal, muon="matrix")
            self.units = parameter(cfg.hidden, start=softplus_root(1.0), learn=learn)

    def readout(self) -> Readout:
        readout = self.scaled_readout(self.W, self.b)
        return readout._replace(move=self.W_2) if self.free else readout

    @property
    def potential(self) -> Potential:
        return POTENTIALS[self.name]

    def weighted(self, value: Tensor) -> Tensor:
        return F.softplus(self.units).to(value.dtype) * value if self.free else value

    def energy(self, z: Tensor, past: Past) -> Tensor:
        return self.scaled(-self.weighted(self.potential.value(z)).sum(-1))

    def force(self, z: Tensor, past: Past) -> Tensor:
        return self.weighted(self.potential.derivative(z))

    def force_and_motion(self, z: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        return self.force(z, past), self.sigma.value(z)

    def curvature(self, norm: Norm) -> Tensor | None:
        """F'' >= -c: L = c |w^(1/2) W Gamma|^2."""
        if not self.potential.concave_by:
            return None
        M = norm.through(self.W)
        rows = self.weighted(M.mT).mT
        return self.scaled_bound(self.potential.concave_by * largest_eigenvalue(M.mT @ rows))

    def guarantee(self) -> Finding:
        if not self.potential.concave_by:
            return self.finding(True, f"concave: its potential {self.name} is convex")
        return self.finding(False, f"its potential {self.name} is not convex")
