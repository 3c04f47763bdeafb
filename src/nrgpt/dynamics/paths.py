"""Between points of a landscape: paths of least energy, basins, escapes, slices."""

import math
from dataclasses import dataclass

import torch
from rich.progress import track
from torch import Tensor

from ..check import check
from .landscape import Flat, Function, gradient, minimise
from .sampling import Heat, walk
from .short import short


@short
@dataclass(frozen=True)
class Path:
    points: Tensor
    """(images, D), from one end to the other."""
    energy: Tensor

    @property
    def barrier(self) -> float:
        """How far the path climbs from the first end."""
        return float(self.energy.max() - self.energy[0])

    @property
    def barrier_back(self) -> float:
        """How far it climbs from the other end."""
        return float(self.energy.max() - self.energy[-1])


@torch.no_grad()
def least_energy_path(
    f: Function,
    surface: Flat,
    start: Tensor,
    end: Tensor,
    *,
    images: int = 17,
    iterations: int = 300,
    rate: float = 0.05,
) -> Path:
    """Between two minima, by the string method: images descend and are spread out evenly again."""
    check(images >= 3, "images", images, "at least 3")
    t = torch.linspace(0, 1, images, dtype=start.dtype, device=start.device)[:, None]
    straight = (1 - t) * start + t * end
    # Opposite points of a sphere have no shortest path between them: bend a little.
    bend = torch.randn(start.shape, generator=torch.Generator().manual_seed(0)).to(start)
    bend = 1e-2 * start.norm() * bend / bend.norm()
    points = surface.retract(straight + 4 * t * (1 - t) * bend)
    for _ in range(iterations):
        points[0], points[-1] = start, end
        step = rate * gradient(f, surface, points)
        step[0] = step[-1] = 0
        points = spread(surface, surface.retract(points - step))
    points[0], points[-1] = start, end
    return Path(points, f(points))


def spread(surface: Flat, points: Tensor) -> Tensor:
    """The same polygon, with its corners at equal distances."""
    lengths = points.diff(dim=0).norm(dim=-1)
    at = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    wanted = torch.linspace(0, 1, len(points), dtype=at.dtype, device=at.device) * at[-1]
    right = torch.searchsorted(at, wanted.contiguous()).clamp(1, len(points) - 1)
    share = (wanted - at[right - 1]) / (at[right] - at[right - 1]).clamp(min=1e-300)
    return surface.retract(points[right - 1] + share[:, None] * (points[right] - points[right - 1]))


@short
@dataclass(frozen=True)
class Basins:
    minima: Tensor
    """(basins, D), the lowest first."""
    energy: Tensor
    counts: Tensor
    """How many of the starts end in each."""
    of_start: Tensor
    """Which basin each start is in."""


def basins(
    f: Function,
    surface: Flat,
    starts: Tensor,
    *,
    distance: float = 1e-2,
    iterations: int = 1_000,
    reach: float = math.inf,
) -> Basins:
    """Descend from many starts. Minima closer than ``distance``, as a share of their size, count as
    one."""
    found = minimise(f, surface, starts, iterations=iterations, reach=reach)
    size = found.u.norm(dim=-1).mean()
    near = torch.cdist(found.u, found.u) < distance * size
    names = torch.full((len(starts),), -1)
    leaders: list[int] = []
    for i in found.energy.argsort().tolist():
        if names[i] < 0:
            names[near[i].cpu() & (names < 0)] = len(leaders)
            leaders.append(i)
    counts = torch.bincount(names, minlength=len(leaders))
    return Basins(found.u[leaders], found.energy[leaders], counts, names)


@torch.no_grad()
def escape_times(
    f: Function,
    surface: Flat,
    minimum: Tensor,
    *,
    temperature: float,
    walkers: int = 32,
    steps: int = 2_000,
    rate: float = 1e-2,
    look_every: int = 20,
    distance: float = 0.1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Steps of Langevin dynamics until each walker has left the minimum's basin, to within
    ``look_every``; infinite for those that stay."""
    times = torch.full((walkers,), float("inf"))
    walking = walk(
        f, surface, minimum.expand(walkers, -1), Heat(temperature, rate, generator=generator)
    )
    for step in track(range(1, steps + 1), "escapes", transient=True):
        point, _ = next(walking)
        if step % look_every == 0:
            below = minimise(f, surface, point.u, iterations=300, tolerance=1e-4).u
            away = (below - minimum).norm(dim=-1).cpu() > distance * float(minimum.norm() + 1)
            times[away & times.isinf()] = step
            if bool(times.isfinite().all()):
                break
    return times


@short
@dataclass(frozen=True)
class Slice:
    """Energies on a plane through a landscape. On a sphere it is like a map of the globe: straight
    lines through the centre are great circles, with true distances along them."""

    axis: Tensor
    """Coordinates along each direction."""
    energy: Tensor
    """[along the second direction, along the first]"""
    centre: Tensor
    directions: Tensor
    surface: Flat

    def place(self, u: Tensor) -> Tensor:
        """Coordinates of points in the plane, (points, 2); others are projected onto it."""
        return self.surface.heading(self.centre, u) @ self.directions.T


@torch.no_grad()
def plane(
    f: Function,
    surface: Flat,
    centre: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    extent: float,
    count: int = 41,
) -> Slice:
    """The plane at ``centre`` (D,) along two directions, which are made orthonormal."""
    first = surface.tangent(centre, first)
    first = first / first.norm()
    second = surface.tangent(centre, second)
    second = second - (second @ first) * first
    check(bool(second.norm() > 1e-12), "second", second, "not parallel to first")
    directions = torch.stack([first, second / second.norm()])
    axis = torch.linspace(-extent, extent, count, dtype=centre.dtype, device=centre.device)
    across, along = torch.meshgrid(axis, axis, indexing="ij")
    steps = torch.stack([along, across], -1).flatten(0, 1) @ directions
    energy = f(surface.walk(centre, steps)).unflatten(0, (count, count))
    return Slice(axis, energy, centre, directions, surface)
