"""The cone: any move can be made to go downhill, at a closed-form price.

Let E be concave in g = Gamma n(x) + delta, with n the norm, and f = -dE/dg at the present g. Then

    E(g') <= E(g) - f . (g' - g)        for every g', near or far,

so a step may go anywhere as long as u . n(x') >= u . n(x), with u = Gamma f (less its mean under
LayerNorm). The new state may have no larger angle to u than the old one: a cone around u. There is
no step size in this, and no line search. Let y be where an update wants to go, e = u / |u|, and

    A(x) = e . x        B(x) = sqrt(|x - A e|^2 + D eps)        (x less its mean under LayerNorm).

e . n(x) grows with A / B, so the least push along e that brings y back into the cone is

    x' = y + max(0, B(y) A(x) / B(x) - A(y)) e.

*Energies that curve.* If no eigenvalue of the Hessian of E in n exceeds L, the right-hand side
gains L/2 |n' - n|^2. Give every state one coordinate more, c = sqrt(D eps): then N, the longer
state scaled to length sqrt(D), has n as its first D coordinates, |N' - N|^2 = 2 (D - N . N') is at
least |n' - n|^2, and the same cone serves around u + L N. Its axis leans towards c a little, so a
push along the first D coordinates of the axis may be too long as well as too short, and where no
push will do, the token stays.

*A margin.* 1 - cos of the angle may be asked to shrink by a share.

*Without a norm* the cone is the half-space u . (x' - x) >= 0. With L > 0 it is a ball around
x + u / L through x, and y is drawn to its nearest point there.

Where there is no force, y may stand. docs/equations.md has the proofs.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .norm import Norm


class Cone(NamedTuple):
    """How moves are kept from raising the energy."""

    norm: Norm
    curvature: Tensor | Callable[[Tensor], Tensor] | None = None
    """L, of all terms together; a function of the state before, if it is another for each token,
    (batch, tokens, 1); None: they are concave."""
    margin: float = 0.0

    def __call__(self, x: Tensor, y: Tensor, force: Tensor) -> Tensor:
        """y, pushed as far as it takes that the energy with this force on g does not rise from x.

        All in float32 at least, under autocast too, which leaves sums and elementwise products
        alone: the push is a difference of large numbers."""
        if callable(self.curvature):
            return self._replace(curvature=self.curvature(x))(x, y, force)
        dtype = torch.promote_types(x.dtype, torch.float32)
        before, after, u = (v.to(dtype) for v in (x, y, force))
        if self.norm.gamma is None:
            return self.flat(before, after, u).to(x.dtype)
        return (self.round if self.curvature is None else self.curved)(before, after, u).to(x.dtype)

    def flat(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        size, e = direction(u)
        rounding, tiny = 8 * torch.finfo(x.dtype).eps, torch.finfo(x.dtype).tiny
        if self.curvature is None:
            push = dot(e, x - y) + rounding * (length(x) + length(y))
            return torch.where(size > 0, y + push.clamp(min=0) * e, y)
        assert isinstance(self.curvature, Tensor)
        centre = u / self.curvature.clamp(min=tiny)
        away = y - x - centre
        radius, distance = length(centre), length(away)
        inside = x + centre + away * ((1 - rounding) * radius / distance.clamp(min=tiny))
        return torch.where(distance > radius, inside, y)

    def round(self, x: Tensor, y: Tensor, force: Tensor) -> Tensor:
        numbers = torch.finfo(x.dtype)
        before, after, u = self.seen(x, y, force)
        size, e = direction(u)
        along_before, across_before = self.parts(before, e)
        along_after, across_after = self.parts(after, e)
        slope = along_before / across_before  # the cotangent of the angle
        if self.margin:
            cosine = self.with_margin(slope * (1 + slope.square()).rsqrt())
            cosine = cosine.clamp(max=1 - 8 * numbers.eps)
            slope = cosine * (1 - cosine.square()).rsqrt()
        # A little more than needed, so that rounding does not decide.
        slope = slope + 8 * numbers.eps * (1 + slope.abs())
        moved = y + (across_after * slope - along_after).clamp(min=0) * e
        # A state that points along the force already, but for rounding, has no cone left: it stays.
        is_stuck = (across_before <= 64 * numbers.eps * length(before)) & (along_before > 0)
        return torch.where(size > 0, torch.where(is_stuck, x, moved), y)

    def curved(self, x: Tensor, y: Tensor, force: Tensor) -> Tensor:
        """With y = A e + what is across it, of length B, W A + m >= k sqrt(A^2 + B^2) is wanted.
        For A = B tan(phi) that is sin(phi + psi) >= k B / R, with tan(psi) = m / W B."""
        assert isinstance(self.curvature, Tensor)
        numbers, D = torch.finfo(x.dtype), x.shape[-1]
        before, after, u = self.seen(x, y, force)
        longer = (length_squared(before) + self.floor(x)).sqrt()  # |(x, c)|
        pull = self.curvature * D**0.5 / longer
        W, e = direction(u + pull * before)
        along_before, _ = self.parts(before, e)
        A, B = self.parts(after, e)
        m = pull * self.floor(x)
        axis = (W.square() + (pull * m).clamp(min=0)).sqrt().clamp(min=numbers.tiny)
        cosine = self.with_margin((W * along_before + m) / (longer * axis))
        k = (cosine + 8 * numbers.eps) * axis
        R = ((W * B).square() + m.square()).sqrt().clamp(min=numbers.tiny)
        sine = k * B / R
        is_out_of_reach = sine >= 1
        sine = sine.clamp(numbers.eps - 1, 1 - numbers.eps)
        cosine = (1 - sine.square()).sqrt()
        # Of the least and the largest phi, as far as they are within (-pi/2, pi/2).
        sine_of_least, cosine_of_least = sine * W * B - cosine * m, cosine * W * B + sine * m
        sine_of_most, cosine_of_most = sine * W * B + cosine * m, sine * m - cosine * W * B
        flat = 1e-6 * R
        is_out_of_reach |= (sine_of_least > 0) & (cosine_of_least.abs() < flat)
        least = quotient(B * sine_of_least, cosine_of_least, flat, -math.inf)
        most = quotient(B * sine_of_most, cosine_of_most, flat, math.inf)
        push = torch.minimum(torch.maximum(A, least), most) - A
        return torch.where(is_out_of_reach, x, y + push * e)

    def seen(self, x: Tensor, y: Tensor, force: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the norm sees of the states, and the force on the normalised token."""
        assert self.norm.gamma is not None
        u = self.norm.centred(self.norm.gamma.to(x.dtype) * force)
        return self.norm.centred(x), self.norm.centred(y), u

    def floor(self, x: Tensor) -> float:
        """c^2. With eps = 0 no less than what rounding leaves of a state."""
        return x.shape[-1] * (self.norm.eps + torch.finfo(x.dtype).eps ** 2)

    def parts(self, v: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """A and B"""
        along = dot(v, e)
        return along, (length_squared(v - along * e) + self.floor(v)).sqrt()

    def with_margin(self, cosine: Tensor) -> Tensor:
        return 1 - (1 - self.margin) * (1 - cosine)


def quotient(a: Tensor, b: Tensor, least: Tensor, otherwise: float) -> Tensor:
    """a / b where b is at least that large."""
    is_large = b >= least
    return torch.where(is_large, a / torch.where(is_large, b, 1.0), otherwise)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def length_squared(v: Tensor) -> Tensor:
    return v.square().sum(-1, keepdim=True)


def length(v: Tensor) -> Tensor:
    return v.norm(dim=-1, keepdim=True)


def direction(u: Tensor) -> tuple[Tensor, Tensor]:
    """|u|, and u of length 1 (0 where there is none)."""
    size = length(u)
    return size, u / size.clamp(min=torch.finfo(u.dtype).tiny)
