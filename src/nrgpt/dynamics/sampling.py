"""Draw states of tokens with Boltzmann's weights exp(-E / T).

A norm leaves of a token its direction u alone: x at other sizes has the same energy, so in x-space
there is nothing to normalise. What has a density is the sphere of u (``Sphere``), or all of R^D
without a norm (``Flat``), with the surface's own measure. A step of Langevin dynamics is drawn in
the tangent space and walked along the geodesic:

    v = -rate grad E + sqrt(2 rate T) noise,    u' = walk(u, v)

As the rate goes to 0 this samples exp(-E / T). At a larger rate it does not quite, unless the step
is tried first (Metropolis-adjusted Langevin, MALA) and taken with the probability min(1, A),

    log A = -(E' - E) / T - (|v' + rate grad' E|^2 - |v + rate grad E|^2) / (4 rate T),

where v' is the way back, v carried along to u' and turned around. (On a sphere of d dimensions, a
density in the tangent space becomes one on the surface by the factor (angle / sin angle)^(d - 1),
which is the same for v and v'. Steps half around or more are refused: there, the way back is
another.)
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..check import check
from .landscape import Flat, Function, gradient


@dataclass(frozen=True)
class Point:
    """Tokens on a surface."""

    u: Tensor
    """(..., D)"""
    energy: Tensor
    """(...)"""
    slope: Tensor
    """The gradient of E along the surface, (..., D)."""

    def where(self, condition: Tensor, other: "Point") -> "Point":
        """This point where the condition (...) holds, elsewhere the other."""
        wide = condition.unsqueeze(-1)
        return Point(
            torch.where(wide, self.u, other.u),
            torch.where(condition, self.energy, other.energy),
            torch.where(wide, self.slope, other.slope),
        )


class Heat:
    """Steps of Langevin dynamics; with ``metropolis``, exact at every rate."""

    def __init__(
        self,
        temperature: float,
        rate: float = 1e-2,
        *,
        metropolis: bool = False,
        generator: torch.Generator | None = None,
    ):
        check(temperature >= 0, "temperature", temperature, "at least 0")
        check(rate > 0, "rate", rate, "positive")
        above = temperature > 0 or not metropolis
        check(above, "temperature", temperature, "positive with metropolis")
        self.temperature, self.rate = temperature, rate
        self.metropolis, self.generator = metropolis, generator

    def propose(self, surface: Flat, here: Point) -> tuple[Tensor, Tensor]:
        """A move along the surface, and where it leads."""
        noise = torch.empty_like(here.u).normal_(generator=self.generator)
        noise = surface.tangent(here.u, noise)
        move = (2 * self.rate * self.temperature) ** 0.5 * noise - self.rate * here.slope
        return move, surface.retract(surface.walk(here.u, move))

    def accepts(self, surface: Flat, here: Point, there: Point, move: Tensor) -> Tensor:
        """Whether each token makes the move that led it from here to there, (...)."""
        back = -surface.carry(here.u, move)
        ways = squared(back + self.rate * there.slope) - squared(move + self.rate * here.slope)
        log_ratio = -(there.energy - here.energy + ways / (4 * self.rate)) / self.temperature
        chance = torch.rand(
            log_ratio.shape,
            generator=self.generator,
            dtype=log_ratio.dtype,
            device=log_ratio.device,
        )
        is_short = move.norm(dim=-1) < surface.reach
        return (chance.log() < log_ratio) & is_short  # nothing that is not a number is accepted


def squared(v: Tensor) -> Tensor:
    return v.square().sum(-1)


@torch.no_grad()
def walk(f: Function, surface: Flat, start: Tensor, heat: Heat) -> Iterator[tuple[Point, Tensor]]:
    """Walkers that never stop, from start (points, D): their next points, and which moved.

    >>> import itertools, torch
    >>> from nrgpt.dynamics.landscape import Sphere
    >>> from nrgpt.dynamics.sampling import Heat, walk
    >>> heat = Heat(0.5, 0.1, metropolis=True, generator=torch.Generator().manual_seed(0))
    >>> walkers = walk(lambda u: -u[:, 0], Sphere(1.0), torch.randn(2_000, 3), heat)
    >>> point, moved = next(itertools.islice(walkers, 60, None))
    >>> exact = 0.537  # the mean of u_0 with weights exp(2 u_0): coth 2 - 1 / 2
    >>> abs(point.u[:, 0].mean().item() - exact) < 0.05
    True
    """

    def look(u: Tensor) -> Point:
        return Point(u, f(u), gradient(f, surface, u))

    here = look(surface.retract(start.detach()))
    moved = torch.ones_like(here.energy, dtype=torch.bool)
    while True:
        move, u = heat.propose(surface, here)
        there = look(u)
        if heat.metropolis:
            moved = heat.accepts(surface, here, there, move)
            there = there.where(moved, here)
        here = there
        yield here, moved
