"""Figures of what the tools of this package find: costs of stopping early, slices of landscapes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .adaptive import Cost
from .figures import new_figure
from .paths import Path as EnergyPath
from .paths import Slice

if TYPE_CHECKING:
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
