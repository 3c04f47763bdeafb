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
gains L/2 |n' - n|^2 <= L (D - n . n') + L/2 (|n|^2 - D). So the cone is one around u + L n, and
the angle must shrink by the little that |n|^2 = D |x|^2 / (|x|^2 + D eps) lacks of D. Where that
cannot be had, the token stays.

*A margin.* 1 - cos of the angle may be asked to shrink by a share.

*Without a norm* the cone is the half-space u . (x' - x) >= 0. With L > 0 it is a ball around
x + u / L through x, and y is drawn to its nearest point there.

Where there is no force, y may stand. docs/equations.md has the proofs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .norm import Norm


class Cone(NamedTuple):
    """How moves are kept from raising the energy."""

    norm: Norm
    curvature: Tensor | None = None
    """L, of all terms together; None: they are concave."""
    margin: float = 0.0

    def __call__(self, x: Tensor, y: Tensor, force: Tensor) -> Tensor:
        """y, pushed as far as it takes that the energy with this force on g does not rise from x.

        All in float32 at least, under autocast too, which leaves sums and elementwise products
        alone: the push is a difference of large numbers."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        before, after, u = (v.to(dtype) for v in (x, y, force))
        inside = self.flat if self.norm.gamma is None else self.round
        return inside(before, after, u).to(x.dtype)

    def flat(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        size, e = direction(u)
        rounding, tiny = 8 * torch.finfo(x.dtype).eps, torch.finfo(x.dtype).tiny
        if self.curvature is None:
            push = dot(e, x - y) + rounding * (length(x) + length(y))
            return torch.where(size > 0, y + push.clamp(min=0) * e, y)
        centre = u / self.curvature.clamp(min=tiny)
        away = y - x - centre
        radius, distance = length(centre), length(away)
        inside = x + centre + away * ((1 - rounding) * radius / distance.clamp(min=tiny))
        return torch.where(distance > radius, inside, y)

    def round(self, x: Tensor, y: Tensor, force: Tensor) -> Tensor:
        norm, D = self.norm, x.shape[-1]
        assert norm.gamma is not None
        numbers = torch.finfo(x.dtype)
        u = norm.centred(norm.gamma.to(x.dtype) * force)
        before, after = norm.centred(x), norm.centred(y)
        floor = norm.eps * D + numbers.tiny
        lacks = None
        if self.curvature is not None:
            square = before.square().sum(-1, keepdim=True) + floor
            u = u + self.curvature * D**0.5 * before / square.sqrt()
            lacks = self.curvature / 2 * D * floor / square
        size, e = direction(u)
        along_before, along_after = dot(before, e), dot(after, e)
        across_before, across_after = (
            (length_squared(v - along * e) + floor).sqrt()
            for v, along in ((before, along_before), (after, along_after))
        )
        slope = along_before / across_before  # the cotangent of the angle
        is_out_of_reach = torch.zeros_like(slope, dtype=torch.bool)
        if self.margin or lacks is not None:
            cosine = slope * (1 + slope.square()).rsqrt()
            if self.margin:
                cosine = 1 - (1 - self.margin) * (1 - cosine)
            if lacks is not None:
                cosine = cosine + lacks / (D**0.5 * size.clamp(min=numbers.tiny))
            room = 8 * numbers.eps
            is_out_of_reach = cosine >= 1 - room
            cosine = cosine.clamp(max=1 - room)
            slope = cosine * (1 - cosine.square()).rsqrt()
        # A little more than needed, so that rounding does not decide.
        slope = slope + 8 * numbers.eps * (1 + slope.abs())
        moved = y + (across_after * slope - along_after).clamp(min=0) * e
        # A state that points along the force already, but for rounding, has no cone left: it stays.
        rounding = 64 * numbers.eps * length(before)
        is_stuck = (across_before <= rounding) & (along_before > 0)
        moved = torch.where(is_stuck | is_out_of_reach, x, moved)
        return torch.where(size > 0, moved, y)


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
