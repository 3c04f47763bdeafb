"""Figures of what the tools of this package find: costs of stopping early, slices of landscapes,
tokens coming to rest."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .adaptive import Cost
from .convergence import Stability, Transients
from .figures import new_figure
from .paths import Path as EnergyPath
from .paths import Slice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def adaptive_figure(costs: Sequence[Cost]) -> "Figure":
    """Loss against the mean number of steps; the first is that of all steps."""
    figure = new_figure(6, 4)
    axis = figure.subplots()
    full, *stopped = costs
    points = sorted((cost.mean_steps, cost.loss) for cost in stopped)
    axis.plot(*zip(*points, strict=True), "o-", label="stopped token by token")
    axis.axhline(full.loss, color="black", linestyle=":", label=f"all {full.mean_steps:g} steps")
    for cost in stopped:
        if cost.stop is not None:
            place = (cost.mean_steps, cost.loss)
            axis.annotate(
                f"{cost.stop.tolerance:g}", place, textcoords="offset points", xytext=(4, 4)
            )
    axis.set(xlabel="mean steps of a token", ylabel="loss (nats)")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def slice_figure(
    found: Slice, trajectory: Tensor | None = None, minima: Tensor | None = None
) -> "Figure":
    """A plane of a landscape as a map, with a token's way and some minima drawn on it."""
    figure = new_figure(6, 5)
    axis = figure.subplots()
    at = found.axis.cpu().numpy()
    shades = axis.contourf(at, at, found.energy.cpu().numpy(), levels=30, cmap="viridis")
    figure.colorbar(shades, label="energy")
    if trajectory is not None:
        way = found.place(trajectory).cpu().numpy()
        axis.plot(way[:, 0], way[:, 1], "o-", color="white", markersize=3, label="the token's way")
        axis.plot(*way[-1], "s", color="red", label="its end")
    if minima is not None:
        place = found.place(minima).cpu().numpy()
        axis.plot(place[:, 0], place[:, 1], "*", color="orange", markersize=12, label="minima")
    if trajectory is not None or minima is not None:
        axis.legend(loc="upper right", fontsize=8)
    axis.set(xlabel="first direction", ylabel="second direction", aspect="equal")
    axis.set(xlim=(at[0], at[-1]), ylim=(at[0], at[-1]))
    return figure


def path_figure(path: EnergyPath) -> "Figure":
    """Energy along a path of least energy."""
    figure = new_figure(6, 3.5)
    axis = figure.subplots()
    lengths = path.points.diff(dim=0).norm(dim=-1).cumsum(0).cpu()
    axis.plot([0.0, *lengths.tolist()], path.energy.cpu(), "o-")
    axis.set(xlabel="way", ylabel="energy", title=f"barrier {path.barrier:.4g}")
    axis.grid(alpha=0.3)
    return figure


def convergence_figure(found: Transients, pushed: Stability | None = None) -> "Figure":
    """How far g still moves at each step, when tokens come to rest by position and, if it was
    asked, what becomes of a push."""
    figure = new_figure(5 * (2 if pushed is None else 3), 4)
    moves, lengths, *rest = figure.subplots(1, 2 if pushed is None else 3)
    steps = range(1, found.steps + 1)
    draw_quantiles(moves, steps, found.moves.flatten(1))
    moves.axhline(found.tolerance, color="black", linestyle="--", label="tolerance")
    moves.axvline(found.trained_steps, color="black", linestyle=":", label="as trained")
    moves.set(xlabel="step", ylabel=r"$\|\Delta g\| / \|g\|$", xscale="log", yscale="log")
    positions = range(found.moves.shape[2])
    for quantile, style in ((0.25, ":"), (0.5, "-"), (0.75, ":")):
        values = found.by_position(quantile)
        lengths.plot(positions, values, style, color="C0", label=f"{100 * quantile:.0f} %")
    lengths.set(xlabel="position", ylabel="steps until at rest", ylim=(0, found.steps))
    share = lengths.twinx()
    share.plot(positions, found.share_at_rest, color="C1", linewidth=1, label="at rest in the end")
    share.set(ylabel="share of texts at rest in the end", ylim=(-0.02, 1.02))
    share.yaxis.label.set_color("C1")
    if pushed is not None:
        (axis,) = rest
        draw_quantiles(axis, range(pushed.steps + 1), pushed.distances.flatten(1))
        axis.set(xlabel="steps after the push", ylabel="distance of $g$, relative", yscale="log")
        power = float(pushed.powers.median())
        axis.set_title(
            f"a push after {pushed.settled} steps falls as $t^{{{-power:.2f}}}$", fontsize=10
        )
    for axis in (moves, lengths, *rest):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


def draw_quantiles(axis: "Axes", t: Sequence[int], values: Tensor) -> None:
    """The median of each row, and bands that hold the middle half and the middle 90 %."""
    # A logarithmic axis has no room for zero.
    values = values.double().clamp(min=torch.finfo(torch.float64).tiny)
    low, lower, middle, higher, high = torch.stack(
        [torch.from_numpy(np.nanquantile(values, q, axis=1)) for q in (0.05, 0.25, 0.5, 0.75, 0.95)]
    )
    axis.fill_between(t, low, high, color="C0", alpha=0.15, label="90 % of tokens")
    axis.fill_between(t, lower, higher, color="C0", alpha=0.3, label="half of them")
    axis.plot(t, middle, color="C0", label="median")
