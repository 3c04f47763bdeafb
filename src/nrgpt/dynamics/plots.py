"""Figures of what the other tools find: the cost of stopping early, slices of landscapes, tokens
that come to rest."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .adaptive import Cost
from .convergence import Stability, Transients
from .figures import AS_TRAINED, new_figure
from .paths import Path as EnergyPath
from .paths import Slice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def adaptive_figure(costs: Sequence[Cost]) -> "Figure":
    """Loss against the mean number of steps; the first cost is that of all steps."""
    figure = new_figure(6, 4)
    axis = figure.subplots()
    full, *stopped = costs
    points = sorted((cost.mean_steps, cost.loss) for cost in stopped)
    axis.plot(*zip(*points, strict=True), "o-", label="stopped token by token")
    axis.axhline(full.loss, color="black", linestyle=":", label=f"all {full.mean_steps:g} steps")
    for cost in stopped:
        if cost.stop is not None:
            name, place = f"{cost.stop.tolerance:g}", (cost.mean_steps, cost.loss)
            axis.annotate(name, place, textcoords="offset points", xytext=(4, 4))
    axis.set(xlabel="mean steps of a token", ylabel="loss (nats)")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def slice_figure(
    found: Slice,
    trajectory: Tensor | None = None,
    minima: Tensor | None = None,
    saddle: Tensor | None = None,
    *,
    names: Sequence[str] = (),
    directions: tuple[str, str] = ("first direction", "second direction"),
) -> "Figure":
    """A map of a plane through a landscape. A token's path, some minima, which may have names, and
    the pass between them can be drawn on it, projected onto the plane if they are not in it."""
    figure = new_figure(6, 5)
    axis = figure.subplots()
    at, energy = found.axis.cpu().numpy(), found.energy.cpu().numpy()
    shades = axis.contourf(at, at, energy, levels=30, cmap="viridis")
    axis.contour(at, at, energy, levels=15, colors="black", linewidths=0.3, alpha=0.5)
    figure.colorbar(shades, label="energy")
    if minima is not None:
        x, y = found.place(minima).T.cpu().numpy()
        axis.plot(x, y, "*", color="orange", markersize=12, label="minima")
        for name, place in zip(names, zip(x, y, strict=True), strict=False):
            axis.annotate(name, place, (0, 9), textcoords="offset points", ha="center",
                          color="white", fontsize=9)  # fmt: skip
    if saddle is not None:
        x, y = found.place(saddle[None]).T.cpu().numpy()
        axis.plot(x, y, "X", color="white", markeredgecolor="black", label="pass")
    if trajectory is not None:
        x, y = found.place(trajectory).T.cpu().numpy()
        axis.plot(x, y, "o-", color="white", markersize=3, label="the token's path")
        axis.plot(x[0], y[0], "o", color="white", markeredgecolor="black", label="its start")
        axis.plot(x[-1], y[-1], "s", color="red", markeredgecolor="white", label="its end")
    if trajectory is not None or minima is not None:
        figure.legend(
            loc="outside upper center", fontsize=8, ncols=5, facecolor="lightgrey", framealpha=1
        )
    axis.set(xlabel=directions[0], ylabel=directions[1], aspect="equal")
    axis.set(xlim=(at[0], at[-1]), ylim=(at[0], at[-1]))
    return figure


def path_figure(path: EnergyPath, names: tuple[str, str] = ("the left", "the right")) -> "Figure":
    """Energy along a path of least energy, from one of these to the other."""
    figure = new_figure(6, 3.5)
    axis = figure.subplots()
    lengths = path.points.diff(dim=0).norm(dim=-1).cumsum(0).cpu()
    axis.plot([0.0, *lengths.tolist()], path.energy.cpu(), "o-", markersize=4)
    axis.axhline(float(path.energy.max()), color="black", linestyle=":", linewidth=1)
    axis.set(xlabel="distance along the path", ylabel="energy")
    up = f"up {path.barrier:.3g} from {names[0]}, {path.barrier_back:.3g} from {names[1]}"
    axis.set_title(up, fontsize=10)
    axis.grid(alpha=0.3)
    return figure


def convergence_figure(found: Transients, pushed: Stability | None = None) -> "Figure":
    """How far g still moves at each step, what share of tokens is at rest, by position, and what
    becomes of a push, if there was one."""
    panels = 2 if pushed is None else 3
    figure = new_figure(5 * panels, 4)
    moves, shares, *rest = axes = figure.subplots(1, panels)
    draw_quantiles(moves, range(1, found.steps + 1), found.moves.flatten(1))
    moves.axhline(found.tolerance, color="black", linestyle="--", label="at rest below")
    moves.axvline(found.trained_steps, **AS_TRAINED, label="as trained")
    moves.set(xlabel="step", ylabel=r"$\|\Delta g\| / \|g\|$", xscale="log", yscale="log")
    moves.set_title("how far tokens move", fontsize=10)
    draw_at_rest(shares, found)
    if pushed is not None:
        (axis,) = rest
        draw_quantiles(axis, range(pushed.steps + 1), pushed.distances.flatten(1))
        axis.set(xlabel="steps after the push", ylabel="distance of $g$, relative")
        axis.set_ylim(bottom=0)
        fall = f"falls as $t^{{{-float(pushed.powers.median()):.2f}}}$"
        axis.set_title(f"a push after {pushed.settled} steps {fall}", fontsize=10)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


def draw_at_rest(axis: "Axes", found: Transients) -> None:
    """The share of tokens at rest, for ever longer ranges of positions."""
    from matplotlib import colormaps

    stretches = doubling(found.moves.shape[2])
    colours = colormaps["viridis"](np.linspace(0, 0.95, len(stretches)))
    for positions, colour in zip(stretches, colours, strict=True):
        first, last = positions.start + 1, positions.stop
        label = f"{first}" if first == last else f"{first} to {last}"
        axis.plot(range(found.steps + 1), found.at_rest(positions), color=colour, label=label)
    axis.axvline(found.trained_steps, **AS_TRAINED)
    axis.set(xlabel="step", ylabel="share of tokens at rest", ylim=(-0.02, 1.02))
    axis.set_title("at rest from that step on, by position", fontsize=10)


def doubling(count: int) -> list[range]:
    """0, 1, 2 to 3, 4 to 7, ... up to ``count`` - 1."""
    edges = [0, 1]
    while edges[-1] < count:
        edges.append(min(2 * edges[-1], count))
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def draw_quantiles(axis: "Axes", t: Sequence[int], values: Tensor) -> None:
    """The median of each row, and bands that hold the middle half and the middle 90 %."""
    # A logarithmic axis has no place for zero.
    values = values.double().clamp(min=torch.finfo(torch.float64).tiny)
    quantiles = np.nanquantile(values, (0.05, 0.25, 0.5, 0.75, 0.95), axis=1)
    low, lower, middle, higher, high = quantiles
    axis.fill_between(t, low, high, color="C0", alpha=0.15, label="90 % of tokens")
    axis.fill_between(t, lower, higher, color="C0", alpha=0.3, label="half of them")
    axis.plot(t, middle, color="C0", label="median")
