"""The landscape of one token of a trained model, with every tool once: where it ends, minima and
their curvatures, basins, a path over the pass between two of them, the saddle on it, escapes from a
minimum by heat, and a map."""

import math
from typing import Any

import torch
from common import Results, Study, screen, windows
from rich.progress import track
from torch import Tensor

from nrgpt.dynamics.figures import new_figure, save
from nrgpt.dynamics.landscape import (
    TokenLandscape,
    gradient,
    lowest_curvatures,
    minimise,
    saddle,
)
from nrgpt.dynamics.paths import Basins, basins, escape_times, least_energy_path, plane
from nrgpt.dynamics.plots import path_figure, slice_figure
from nrgpt.train.runs import Run


@torch.no_grad()
def landscape(study: Study) -> None:
    """Of the token at three quarters of the first validation text."""
    results = Results(study.to / "landscape.json")
    for run in study.open():
        name, model = run.folder.name, run.model.double()
        context = model.cfg.context
        text = windows(run, context)[:1, :-1]
        token = 3 * text.shape[1] // 4
        land = TokenLandscape(model, text, token)
        results.add(run, "token", token)
        results.add(run, "text up to it", run.decode(text[0, : token + 1].tolist()))
        way = land.trajectory()
        results.add(run, "end", about(land, way[-1]))
        results.add(run, "energies along the way", land(way))
        below = minimise(land, land.surface, way[-1:], iterations=study.size(5_000, 20))
        here = below.u[0]
        results.add(run, "minimum below the end", about(land, here))
        results.add(run, "distance to it", (here - way[-1]).norm().item())
        steepest = max(steepness(land, way[-1]), steepness(land, here))
        results.add(run, "largest curvature at both", steepest)
        pits = find_basins(study, land, here)
        shown = [
            {"starts": int(pits.counts[i]), **about(land, pits.minima[i])}
            for i in range(min(5, len(pits.minima)))
        ]
        results.add(run, "lowest basins", shown)
        results.add(run, "basins", len(pits.minima))
        screen.print(
            f"{len(pits.minima)} basins; the end is at {land(way[-1:]).item():.2f}, the minimum "
            f"below it at {below.energy.item():.2f}, the lowest at {pits.energy[0].item():.2f}"
        )
        save(basin_figure(pits, land(way[-1:]).item()), study.to / f"basins-{name}", ("png",))

        other = farthest(pits, here)
        results.add(run, "path leads to", "the start of the way" if other is None else "a minimum")
        goal = way[0] if other is None else other
        path = least_energy_path(
            land,
            land.surface,
            here,
            goal,
            images=study.size(33, 5),
            iterations=study.size(3_000, 5),
            rate=0.3 / steepest,
        )
        results.add(run, "path", {"energy": path.energy, "barrier": path.barrier})
        save(path_figure(path), study.to / f"path-{name}", ("png",))
        results.add(
            run, "saddles", saddles(study, land, path.points[path.energy.argmax()], steepest)
        )

        if other is not None:  # out of the shallower of the two
            shallow = path.barrier < path.barrier_back
            pit, barrier = (here, path.barrier) if shallow else (other, path.barrier_back)
            results.add(run, "escapes out of", {"energy": land(pit[None]).item(), "by": barrier})
            times = escapes(study, land, pit, barrier, steepest)
            results.add(run, "escape times by temperature", times)
            save(escape_figure(times, study.size(4_000, 6)), study.to / f"escapes-{name}", ("png",))
        map_of(study, run, land, way, here, pits)


def map_of(
    study: Study, run: Run, land: TokenLandscape, way: Tensor, here: Tensor, pits: Basins
) -> None:
    """The plane through the token's end, the minimum below it and the start of its way."""
    end = way[-1]
    first, second = (land.surface.heading(end, u) for u in (here, way[0]))
    if first.norm() < 1e-6 * end.norm():  # it ended at the minimum
        first = land.surface.heading(end, way[-2])
    extent = 1.3 * float(torch.stack([first.norm(), second.norm()]).max())
    cut = plane(land, land.surface, end, first, second, extent=extent, count=study.size(81, 7))
    save(slice_figure(cut, way, here[None]), study.to / f"slice-{run.folder.name}", ("png",))


def about(land: TokenLandscape, u: Tensor) -> dict[str, Any]:
    """Energy, slope and lowest curvatures of a point."""
    values, _ = lowest_curvatures(land, land.surface, u, 5, iterations=min(80, len(u)))
    return {
        "energy": land(u[None]).item(),
        "slope": gradient(land, land.surface, u[None]).norm().item(),
        "lowest curvatures": values,
        "curvatures below zero, of these": int((values < 0).sum()),
    }


def steepness(land: TokenLandscape, u: Tensor) -> float:
    """The largest curvature, or the largest in size: what a step length must respect."""
    low, _ = lowest_curvatures(land, land.surface, u, 1)
    high, _ = lowest_curvatures(lambda u: -land(u), land.surface, u, 1)
    return max(abs(float(low)), abs(float(high)))


def find_basins(study: Study, land: TokenLandscape, here: Tensor) -> Basins:
    generator = torch.Generator(here.device).manual_seed(0)
    random = land.random_points(study.size(200, 4), generator)
    # Half of them near the end's minimum: the landscape has many directions to leave it.
    near = land.surface.retract(here + 0.5 * random[: len(random) // 2])
    starts = torch.cat([random[len(random) // 2 :], near, here[None]])
    return basins(land, land.surface, starts, iterations=study.size(3_000, 20), distance=0.02)


def farthest(pits: Basins, here: Tensor) -> Tensor | None:
    """The most visited minimum that is not the one we are in."""
    away = (pits.minima - here).norm(dim=-1).cpu() > 0.05 * float(here.norm())
    if not bool(away.any()):
        return None
    return pits.minima[int(torch.where(away, pits.counts, -1).argmax())]


def saddles(study: Study, land: TokenLandscape, top: Tensor, steepest: float) -> list[Any]:
    """From the top of the path, of index 1 and 2."""
    found = []
    for index in (1, 2):
        u, _ = saddle(
            land,
            land.surface,
            top,
            index=index,
            iterations=study.size(150, 3),
            tolerance=1e-5,
            rate=0.3 / steepest,
        )
        found.append({"looked for index": index, **about(land, u)})
    return found


def escapes(
    study: Study, land: TokenLandscape, here: Tensor, barrier: float, steepest: float
) -> dict[str, dict[str, float]]:
    """Langevin steps until walkers leave the basin, at temperatures from below the barrier to far
    above it."""
    found = {}
    unit = max(barrier, 1e-3)
    scales = (1.0, 30.0) if study.quick else (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
    for scale in track(scales, "temperatures"):
        times = escape_times(
            land,
            land.surface,
            here,
            temperature=scale * unit,
            walkers=study.size(32, 3),
            steps=study.size(4_000, 6),
            rate=0.3 / steepest,
            look_every=study.size(50, 3),
            distance=0.05,
            generator=torch.Generator(here.device).manual_seed(0),
        )
        found[f"{scale * unit:.4g}"] = {
            "temperature / barrier": scale,
            "median steps": times.median().item(),
            "share that left": times.isfinite().double().mean().item(),
        }
    return found


def escape_figure(times: dict[str, dict[str, float]], steps: int) -> Any:
    """Median escape times, and the share that left beside each; where fewer than half left, the
    median is beyond the steps taken."""
    figure = new_figure(6, 3.5)
    axis = figure.subplots()
    entries = list(times.values())
    scales = [entry["temperature / barrier"] for entry in entries]
    medians = [entry["median steps"] for entry in entries]
    axis.plot(scales, [m if math.isfinite(m) else math.nan for m in medians], "o-", color="C0")
    late = [s for s, m in zip(scales, medians, strict=True) if not math.isfinite(m)]
    if late:
        label = f"more than {steps:,}"
        axis.plot(late, [steps] * len(late), "^", color="C0", fillstyle="none", label=label)
        axis.legend(fontsize=8)
    for scale, median, entry in zip(scales, medians, entries, strict=True):
        axis.annotate(
            f"{100 * entry['share that left']:.0f} %",
            (scale, min(median, steps)),
            textcoords="offset points",
            xytext=(6, 5),
            fontsize=8,
        )
    axis.set(xlabel="temperature / barrier", ylabel="median steps until escape")
    axis.set_title(f"percent: walkers that left within {steps:,} steps", fontsize=10)
    axis.set(yscale="log", ylim=(None, 2 * steps))
    axis.set_xscale("log", base=2)
    axis.set_xticks(scales, [f"{scale:g}" for scale in scales])
    axis.margins(x=0.1)
    axis.grid(alpha=0.3)
    return figure


def basin_figure(pits: Basins, end: float) -> Any:
    """How many starts each minimum drew, by its energy."""
    figure = new_figure(6, 3.5)
    axis = figure.subplots()
    axis.vlines(pits.energy.cpu(), 0, pits.counts, color="C0")
    axis.plot(pits.energy.cpu(), pits.counts, "o", color="C0", label="minima")
    found = zip(pits.energy.tolist(), pits.counts.tolist(), strict=True)
    for i, (energy, count) in enumerate(found):  # left and right by turns: some are close
        beside: dict[str, Any] = {"xytext": (6, 3)} if i % 2 else {"xytext": (-6, 3), "ha": "right"}
        axis.annotate(f"{count}", (energy, count), textcoords="offset points", fontsize=8, **beside)
    axis.axvline(end, color="red", linestyle=":", label="where the token ends")
    axis.set(xlabel="energy", ylabel=f"of {len(pits.of_start)} starts, end there")
    axis.set_ylim(0, 1.12 * float(pits.counts.max()))
    axis.margins(x=0.1)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper center", fontsize=8)
    return figure
