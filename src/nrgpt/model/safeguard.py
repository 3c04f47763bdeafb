"""The cone: any move can be made to go downhill, at a closed-form price.

Let E be concave in g = Gamma n(x) + delta, with n the norm, and f = -dE/dg at the present g. Then

    E(g') <= E(g) - f . (g' - g)        for every g', near or far,

so a step may go anywhere as long as u . n(x') >= u . n(x), with u = Gamma f (less its mean under
LayerNorm). The new state may have no larger angle to u than the old one: a cone around u. There is
no step size in this, and no line search. Let y be where an update wants to go, e = u / |u|, and

    A(x) = e . x        B(x) = sqrt(|x - A e|^2 + D eps)        (x less its mean under LayerNorm).

e . n(x) grows with A / B, so the least push along e that brings y back into the cone is

    x' = y + max(0, B(y) A(x) / B(x) - A(y)) e.

Without a norm, the cone is the half-space f . (x' - x) >= 0. Where there is no force, y may stand.
docs/equations.md has the proof.
"""

import torch
from torch import Tensor

from .norm import Norm


def cone(norm: Norm, x: Tensor, y: Tensor, force: Tensor) -> Tensor:
    """y, pushed along the force on g as far as it takes that no concave energy rises from x to y.

    All in float32 at least: the push is a difference of large numbers."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    before, after, u = (v.to(dtype) for v in (x, y, force))
    if norm.gamma is not None:
        u = norm.centred(norm.gamma.to(dtype) * u)
        before, after = norm.centred(before), norm.centred(after)
    tiny = torch.finfo(dtype).tiny
    size = u.norm(dim=-1, keepdim=True)
    e = u / size.clamp(min=tiny)
    along_before, along_after = ((v * e).sum(-1, keepdim=True) for v in (before, after))
    if norm.gamma is None:
        push = along_before - along_after
    else:
        floor = norm.eps * x.shape[-1] + tiny
        across_before, across_after = (
            ((v - along * e).square().sum(-1, keepdim=True) + floor).sqrt()
            for v, along in ((before, along_before), (after, along_after))
        )
        push = across_after * (along_before / across_before) - along_after
    moved = y.to(dtype) + push.clamp(min=0) * e
    if norm.gamma is not None:
        # A state that points along the force already, but for rounding, has no cone left: it stays.
        rounding = 64 * torch.finfo(dtype).eps * before.norm(dim=-1, keepdim=True)
        is_stuck = (across_before <= rounding) & (along_before > 0)
        moved = torch.where(is_stuck, x.to(dtype), moved)
    return torch.where(size > 0, moved, y.to(dtype)).to(x.dtype)
