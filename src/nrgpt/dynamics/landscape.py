"""The landscape itself: minima, saddles and their curvature.

Everything here works on a function ``f`` of a batch of points, (points, D) -> (points,), on a
surface: ``Flat`` space, or the ``Sphere`` of a norm (E depends on a token only through its
normalised state u, and ||u||^2 = D). ``TokenLandscape`` is this function for one token with a
frozen past.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..check import check
from ..model.network import Network
from ..model.norm import LayerNorm, NoNorm, Norm
from ..model.step import Extra
from .field import Field
from .short import short

Function = Callable[[Tensor], Tensor]


class Flat:
    """All of R^D."""

    reach = math.inf
    """How far one can walk before another way to the same place is shorter."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def retract(self, u: Tensor) -> Tensor:
        """The point of the surface nearest to u."""
        return u

    def tangent(self, u: Tensor, v: Tensor) -> Tensor:
        """The part of v along the surface at u."""
        return v

    def curve(self, u: Tensor, gradient: Tensor, v: Tensor) -> Tensor:
        """What the surface's own curvature takes from the second derivative along v."""
        return torch.zeros_like(v)

    def walk(self, u: Tensor, v: Tensor) -> Tensor:
        """The point reached from u by going straight along v, as far as v is long."""
        return u + v

    def carry(self, u: Tensor, v: Tensor) -> Tensor:
        """v as it points at the end of that walk: from there, -carry(u, v) leads back to u."""
        return v

    def heading(self, u: Tensor, other: Tensor) -> Tensor:
        """The direction and distance from u to other points: walk(u, heading(u, o)) is o."""
        return other - u


class Sphere(Flat):
    """||u|| = radius and, for LayerNorm, sum(u) = 0."""

    def __init__(self, radius: float, *, centred: bool = False):
        check(radius > 0, "radius", radius, "positive")
        self.radius, self.centred = radius, centred
        self.reach = math.pi * radius

    def __repr__(self) -> str:
        return f"Sphere({self.radius:.4g}{', centred=True' if self.centred else ''})"

    def centre(self, v: Tensor) -> Tensor:
        return v - v.mean(-1, keepdim=True) if self.centred else v

    def along(self, u: Tensor, v: Tensor) -> Tensor:
        """How much of v points along u, as a multiple of u."""
        return (u * v).sum(-1, keepdim=True) / self.radius**2

    def retract(self, u: Tensor) -> Tensor:
        u = self.centre(u)
        return self.radius * u / u.norm(dim=-1, keepdim=True)

    def tangent(self, u: Tensor, v: Tensor) -> Tensor:
        v = self.centre(v)
        return v - u * self.along(u, v)

    def curve(self, u: Tensor, gradient: Tensor, v: Tensor) -> Tensor:
        return v * self.along(u, gradient)

    def walk(self, u: Tensor, v: Tensor) -> Tensor:
        angle = v.norm(dim=-1, keepdim=True) / self.radius
        return angle.cos() * u + torch.sinc(angle / math.pi) * v  # sin(angle) / angle

    def carry(self, u: Tensor, v: Tensor) -> Tensor:
        angle = v.norm(dim=-1, keepdim=True) / self.radius
        return angle.cos() * v - angle * angle.sin() * u

    def heading(self, u: Tensor, other: Tensor) -> Tensor:
        along = self.along(u, other)
        across = other - along * u
        size = across.norm(dim=-1, keepdim=True)
        angle = torch.atan2(size, self.radius * along)
        return self.radius * angle * across / size.clamp(min=torch.finfo(u.dtype).tiny)


def surface_of(norm: Norm, width: int) -> Flat:
    """Where the states that the norm leaves are."""
    if isinstance(norm, NoNorm):
        return Flat()
    return Sphere(width**0.5, centred=isinstance(norm, LayerNorm))


class TokenLandscape:
    """E of one token as a function of its normalised state, with all other tokens held still.

    >>> import nrgpt, torch
    >>> from nrgpt.dynamics.landscape import TokenLandscape, minimise
    >>> cfg = nrgpt.ModelConfig(vocab_size=65, context=16, width=16, heads=2, steps=8)
    >>> model, idx = nrgpt.LanguageModel(cfg).double(), torch.randint(65, (1, 16))
    >>> land = TokenLandscape(model, idx, token=9)
    >>> found = minimise(land, land.surface, land.random_points(5))
    >>> bool((found.energy <= land(found.start)).all())
    True
    """

    def __init__(
        self,
        model: Network,
        idx: Tensor,
        token: int,
        *,
        steps: int | None = None,
        extra: Extra | None = None,
    ):
        check(idx.shape[0] == 1, "idx", tuple(idx.shape), "one text, of shape (1, tokens)")
        check(0 <= token < idx.shape[1], "token", token, f"in 0 .. {idx.shape[1] - 1}")
        self.token = token
        with torch.no_grad():
            states = list(model.states(idx, steps=steps, extra=extra, dropout=False))
            self.field = Field(model, states[0], extra=extra, past=states[-1])
        self.states = torch.cat(states)
        self.surface = surface_of(model.energy_block.norm, model.cfg.width)

    def __repr__(self) -> str:
        return f"TokenLandscape(token {self.token} of {self.states.shape[1]}, {self.surface})"

    def __call__(self, u: Tensor) -> Tensor:
        """Energies of the points u, (points, D)."""
        # As many tokens at the same position of one text, whose keys are read once.
        self.field.aim(torch.full((1, len(u)), self.token, device=u.device))
        return self.field.energy(u.unsqueeze(0))[0]

    def trajectory(self) -> Tensor:
        """Where the token was after 0, 1, ... steps, on the surface: (steps + 1, D)."""
        return self.surface.retract(self.states[:, self.token])

    def random_points(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        u = self.states.new_empty(count, self.states.shape[-1])
        return self.surface.retract(u.normal_(generator=generator))


def gradient(f: Function, surface: Flat, u: Tensor) -> Tensor:
    """Along the surface, at each point."""
    return surface.tangent(u, torch.func.grad(lambda u: f(u).sum())(u))


@short
@dataclass(frozen=True)
class Minima:
    start: Tensor
    u: Tensor
    """(points, D)"""
    energy: Tensor
    slope: Tensor
    """Norm of the remaining gradient along the surface."""


@torch.no_grad()
def minimise(
    f: Function,
    surface: Flat,
    start: Tensor,
    *,
    iterations: int = 500,
    tolerance: float = 1e-6,
    rate: float = 1.0,
    reach: float = math.inf,
) -> Minima:
    """Descend from each point until every slope is below the tolerance. Steps follow the gradient;
    they grow where f falls and shrink where it would rise. Long ones may leap into the next basin,
    which a ``reach``, the longest step as a share of sqrt(D), prevents."""
    u = surface.retract(start.detach())
    energy = f(u)
    size = torch.full_like(energy, rate)
    for _ in range(iterations):
        slope = gradient(f, surface, u)
        if bool((slope.norm(dim=-1) <= tolerance).all()):
            break
        longest = reach * math.sqrt(u.shape[-1]) / slope.norm(dim=-1).clamp(min=1e-30)
        size = size.minimum(longest)
        tried = surface.retract(u - size[:, None] * slope)
        value = f(tried)
        falls = value <= energy - 1e-4 * size * slope.square().sum(-1)
        u = torch.where(falls[:, None], tried, u)
        energy = torch.where(falls, value, energy)
        size = torch.where(falls, 1.5 * size, 0.3 * size)
    return Minima(start, u, energy, gradient(f, surface, u).norm(dim=-1))


def hessian_product(f: Function, surface: Flat, u: Tensor, v: Tensor) -> Tensor:
    """The second derivative along the surface at u (D,), times v (D,)."""

    def slope(u: Tensor) -> Tensor:
        return torch.func.grad(lambda u: f(u[None]).sum())(u)

    change = torch.func.grad(lambda u: slope(u) @ v)(u)
    return surface.tangent(u, change) - surface.curve(u, slope(u), v)


@torch.no_grad()
def lowest_curvatures(
    f: Function, surface: Flat, u: Tensor, count: int = 3, *, iterations: int = 60
) -> tuple[Tensor, Tensor]:
    """The smallest eigenvalues of the Hessian along the surface at u (D,), and their directions
    (count, D), by Lanczos with full orthogonalisation. A point of zero slope is a minimum if none
    is below zero, and a saddle of index k if k are."""
    v = surface.tangent(u, torch.randn_like(u))
    basis: list[Tensor] = []
    alphas: list[Tensor] = []
    betas = [v.norm()]
    for _ in range(iterations):
        basis.append(v / betas[-1])
        w = hessian_product(f, surface, u, basis[-1])
        alphas.append(w @ basis[-1])
        for _ in range(2):  # once is not enough in finite precision
            for b in basis:
                w = w - (w @ b) * b
        v = surface.tangent(u, w)
        betas.append(v.norm())
        if betas[-1] < 1e-10 * max(1.0, float(alphas[0].abs())):
            break
    T = torch.diag(torch.stack(alphas))
    if len(alphas) > 1:
        off = torch.stack(betas[1 : len(alphas)])
        T = T + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(T)
    return values[:count], vectors[:, :count].T @ torch.stack(basis)


@torch.no_grad()
def saddle(
    f: Function,
    surface: Flat,
    start: Tensor,
    *,
    index: int = 1,
    iterations: int = 300,
    tolerance: float = 1e-6,
    rate: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """From start (D,), up along the ``index`` lowest curvatures and down along all others. Returns
    the point reached and the smallest curvatures there; at a saddle ``index`` of them are below
    zero."""
    check(index >= 1, "index", index, "at least 1")
    u = surface.retract(start.detach())
    for _ in range(iterations):
        slope = gradient(f, surface, u[None])[0]
        if slope.norm() <= tolerance:
            break
        values, up = lowest_curvatures(f, surface, u, index)
        along = up @ slope
        # Newton's length along the known curvatures, a plain step along the rest.
        newton = (along / values.abs().clamp(min=1e-3)).clamp(-1, 1) @ up
        u = surface.retract(u + newton - rate * (slope - along @ up))
    return u, lowest_curvatures(f, surface, u, index + 1)[0]
