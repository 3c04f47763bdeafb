"""A survey of one token's landscape: where it ends, the minima that random starts find, the pass
between two of them, maps, and what the model would say in each minimum."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..check import check
from ..model.network import Network
from ..model.step import Extra
from .figures import Label, visible
from .landscape import Flat, TokenLandscape, saddle
from .paths import Basins, Path, Slice, basins, least_energy_path, plane
from .short import short

REACH = 0.05
"""The longest step of a search, so that a start ends in its own basin. The page takes the same."""


@short
@dataclass(frozen=True)
class Survey:
    token: int
    way: Tensor
    """Where the token was after 0, 1, ... steps, (steps + 1, D), and its energy there."""
    way_energy: Tensor
    starts: Tensor
    """The end of the way, its start, and random points; with their energies."""
    start_energy: Tensor
    found: Basins
    """The minima that these lead to."""
    between: Path | None
    """From the minimum below the end to the other one that most starts find, if there is one."""
    saddle: Tensor | None
    saddle_energy: float | None
    curvatures: Tensor | None
    """The two lowest at the saddle: one below zero, the other above."""
    sections: dict[str, Slice]
    """Maps through the token's end. ``path``: with its start and the minimum below, so that its
    path can be seen; ``minima``, where there are two: with both, so that the pass can."""
    said: Tensor
    """The likeliest tokens at the end of the way and in each minimum, (1 + minima, top)."""
    chances: Tensor
    entropy: Tensor

    @property
    def below(self) -> int:
        """The minimum below the token's end."""
        return int(self.found.of_start[0])

    @property
    def shown(self) -> list[int]:
        """The minima of the maps."""
        other = other_minimum(self.found, self.below)
        return [self.below] if other is None else [self.below, other]

    def rows(self, label: Label = str) -> list[tuple[str, str, str, str]]:
        """A table: which minimum, its energy, how many starts end there, what it says."""
        texts = [says(label, *pair) for pair in zip(self.said, self.chances, strict=True)]
        energies = [self.way_energy[-1], *self.found.energy]
        names = ["end of the way", *(f"minimum {i + 1}" for i in range(len(texts) - 1))]
        names[1 + self.below] += " (below the end)"
        counts = ["", *(str(int(n)) for n in self.found.counts)]
        return [
            (name, f"{float(e):.4g}", n, text)
            for name, e, n, text in zip(names, energies, counts, texts, strict=True)
        ]

    def record(self) -> dict[str, Any]:
        """For the page: what static/landscape.js computes for models that are in the page."""
        minima = [
            {
                "energy": float(self.found.energy[i]),
                "count": int(self.found.counts[i]),
                "said": self.said[i + 1].tolist(),
                "chances": self.chances[i + 1].tolist(),
                "entropy": float(self.entropy[i + 1]),
            }
            for i in range(len(self.found.minima))
        ]
        names = ["its end", "its start", *(f"start {i + 1}" for i in range(len(self.starts) - 2))]
        origins = zip(names, self.start_energy.tolist(), self.found.of_start.tolist(), strict=True)
        return {
            "token": self.token,
            "sections": {name: self.section(name) for name in self.sections},
            "pathEnergy": self.way_energy.tolist(),
            "minima": minima,
            "starts": [{"from": n, "energy": e, "basin": b} for n, e, b in origins],
            "pass": None if self.saddle is None else {"energy": self.saddle_energy},
            "end": {"said": self.said[0].tolist(), "chances": self.chances[0].tolist()},
        }

    def section(self, name: str) -> dict[str, Any]:
        """One map, with what lies in its plane."""
        cut, shown = self.sections[name], self.shown if name == "minima" else [self.below]
        places = cut.place(self.found.minima[shown]).tolist()
        top = self.saddle if name == "minima" else None
        return {
            "axis": cut.axis.tolist(),
            "energy": cut.energy.tolist(),
            "own": None,
            "path": cut.place(self.way).tolist(),
            "minima": [{"which": i, "at": at} for i, at in zip(shown, places, strict=True)],
            "pass": None if top is None else cut.place(top[None])[0].tolist(),
        }


@torch.no_grad()
def survey(
    model: Network,
    idx: Tensor,
    token: int,
    *,
    steps: int | None = None,
    starts: int = 16,
    count: int = 61,
    extra: Extra | None = None,
    seed: int = 0,
) -> Survey:
    """Of the ``token``-th token of a text (1, tokens). Best with a model in float64.

    >>> import nrgpt, torch
    >>> from nrgpt.dynamics.survey import survey
    >>> cfg = nrgpt.ModelConfig(vocab_size=65, context=16, width=16, heads=2, steps=4)
    >>> model, idx = nrgpt.LanguageModel(cfg).double(), torch.randint(65, (1, 16))
    >>> found = survey(model, idx, 9, starts=4, count=5)
    >>> bool((found.found.energy <= found.way_energy[-1]).any())
    True
    """
    check(starts >= 0, "starts", starts, "at least 0")
    check(count >= 3, "count", count, "at least 3")
    land = TokenLandscape(model, idx, token, steps=steps, extra=extra)
    generator = torch.Generator(idx.device).manual_seed(seed)
    way = land.trajectory()
    points = torch.cat([way[-1:], way[:1], land.random_points(starts, generator)])
    found = basins(land, land.surface, points, distance=0.02, iterations=2_000, reach=REACH)
    below = int(found.of_start[0])
    other = other_minimum(found, below)
    between, top, energy, curvatures = None, None, None, None
    if other is not None:
        ends = found.minima[below], found.minima[other]
        between = least_energy_path(land, land.surface, *ends, images=17, iterations=120)
        highest = int(between.energy.argmax())
        if 0 < highest < len(between.points) - 1:  # otherwise one of the two is no pit
            top, curvatures = saddle(
                land, land.surface, between.points[highest], iterations=6, rate=0.04
            )
            energy = float(land(top[None]))
    lowest = found.minima[below]
    sections = {"path": map_of(land, way, lowest, way[0], count, generator)}
    if other is not None:
        sections["minima"] = map_of(land, way, lowest, found.minima[other], count, generator)
    log_p = model.readout(torch.cat([way[-1:], found.minima])).log_softmax(-1)
    chances, said = log_p.exp().topk(min(5, model.cfg.vocab_size))
    entropy = -(log_p.exp() * log_p).sum(-1)
    return Survey(
        token, way, land(way), points, land(points), found, between, top, energy, curvatures,
        sections, said, chances, entropy,
    )  # fmt: skip


def other_minimum(found: Basins, below: int) -> int | None:
    """The minimum that most starts find, apart from the one below the end."""
    others = [i for i in range(len(found.counts)) if i != below]
    return max(others, key=lambda i: int(found.counts[i]), default=None)


def map_of(
    land: TokenLandscape,
    way: Tensor,
    below: Tensor,
    target: Tensor,
    count: int,
    generator: torch.Generator,
) -> Slice:
    """The plane through the end of the way, the minimum below it, and a third point, wide enough
    for all of them. Where two of them are one, any direction will do."""
    surface, end = land.surface, way[-1]
    directions = [surface.heading(end, u) for u in (below, target)]
    directions += [surface.tangent(end, v) for v in land.random_points(2, generator)]
    directions = [v for v in directions if v.norm() > 1e-6 * end.norm()]
    first = directions[0]
    second = next(v for v in directions[1:] if across(first, v) > 1e-3)
    reach = max(float(surface.heading(end, u).norm()) for u in (below, target, *way))
    limit = math.inf if type(surface) is Flat else 0.98 * math.pi * float(end.norm())
    return plane(land, surface, end, first, second, extent=min(1.2 * reach, limit), count=count)


def across(first: Tensor, v: Tensor) -> float:
    """How much of v is not along first, as a share."""
    cosine = float((first @ v) / (first.norm() * v.norm()))
    return 1 - abs(cosine)


def says(label: Label, said: Tensor, chances: Tensor) -> str:
    """The likeliest tokens, with their probabilities."""
    likeliest = list(zip(said.tolist(), chances.tolist(), strict=True))[:3]
    told = [(n, f"{100 * p:.0f}") for n, p in likeliest]
    return ", ".join(f"{visible(label(n))} {p} %" for n, p in told if p != "0")
