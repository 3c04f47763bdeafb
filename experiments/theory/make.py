"""What the paper says about eta and about settling, measured: figures and results.jsonl.

    python -m experiments.theory.make            # about half an hour on one CPU core
    python -m experiments.theory.make --quick    # a minute, to see that it works; into out/
    python -m experiments.theory.make --plots-only

A part that is on record is not computed again.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nrgpt.dynamics.figures import new_figure, save
from nrgpt.train.report import environment

from .oscillation import ENERGIES, FAMILIES, periods, quadratic, study
from .settling import MODELS, settling
from .split import KINDS, SPREAD, split

HERE = Path(__file__).parent
NORMS = ("layernorm", "rmsnorm", "none")
TRACED = (
    ("FF1 (GELU)", "layernorm", "identity", 3.0),
    ("FF1 (GELU)", "layernorm", "gaussian", 0.0),
    ("memory (ReLU²)", "none", "psd_skew", 3.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny, into out/theory-quick")
    parser.add_argument("--plots-only", action="store_true", help="draw what is on record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    to = Path("out/theory-quick") if options.quick else HERE
    to.mkdir(parents=True, exist_ok=True)
    if not options.plots_only:
        for part, rows in parts(to, options.quick):
            keep(to, part, rows)
    rows = [json.loads(line) for line in (to / "results.jsonl").read_text().splitlines()]
    draw_shares(to, [row for row in rows if row["part"].startswith(("shares", "quadratic"))])
    draw_settling(to, [row for row in rows if row["part"].startswith("settling")])


def known(to: Path) -> set[str]:
    file = to / "results.jsonl"
    return (
        {json.loads(line)["part"] for line in file.read_text().splitlines()}
        if file.exists()
        else set()
    )


def keep(to: Path, part: str, rows: list[dict[str, Any]]) -> None:
    """Append rows, each with where it comes from."""
    origin = environment()
    origin = {name: origin[name] for name in ("commit", "command", "torch")}
    with (to / "results.jsonl").open("a") as file:
        for row in rows:
            file.write(json.dumps({"part": part, **row, **origin}) + "\n")
    print(f"{part}: {len(rows)} rows", flush=True)


def parts(to: Path, quick: bool) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """What is not on record yet."""
    done = known(to)
    size = {"draws": 2, "starts": 5} if quick else {"draws": 6, "starts": 50}
    steps = {16: 64, 32: 64, 64: 64} if quick else {16: 4_096, 32: 2_048, 64: 2_048}
    for family in FAMILIES:
        for D in (16,) if quick else (16, 32, 64):
            if (name := f"quadratic-{family}-{D}") not in done:
                yield name, quadratic(family, D, 20 if quick else 500)
    few = [
        (energy, "layernorm", family) for family in ("identity", "gaussian") for energy in ENERGIES
    ]
    all_of = [
        (energy, norm, family) for norm in NORMS for family in FAMILIES for energy in ENERGIES
    ]
    plans = [(*which, 16, which[1] != "none") for which in all_of]
    plans += [(*which, 16, False) for which in few]
    plans += [] if quick else [(*which, D, True) for D in (32, 64) for which in few]
    for energy, norm, family, D, held in plans:
        name = f"shares-{energy}-{norm}-{family}-{D}" + (
            "" if held or norm == "none" else "-growing"
        )
        if name not in done:
            yield name, study(energy, norm, family, D, steps=steps[D], held=held, **size)
    if "periods" not in done:
        traced = [periods(e, n, f, 16, v, steps=64 if quick else 2_048) for e, n, f, v in TRACED]
        draw_traces(to, traced)
        yield "periods", [row for row, *_ in traced]
    if "split" not in done:
        sizes = {"D": 32, "size": 8, **size, "steps": 50 if quick else 4_000}
        cases = [(kind, v) for kind in KINDS for v in (SPREAD if "free" in kind else (1.0,))]
        yield "split", [split(e, kind, v, **sizes) for e in ENERGIES for kind, v in cases]
    for model in MODELS:
        if f"settling-{model}" not in done:
            sizes = (2, 8, 64) if quick else (4, 64, 2_048)
            texts, length, steps_there = sizes
            yield (
                f"settling-{model}",
                [settling(model, texts=texts, length=length, steps=steps_there)],
            )


# Figures ------------------------------------------------------------------------------------------


def draw_shares(to: Path, rows: list[dict[str, Any]]) -> None:
    """A panel for each norm and family: the share of tokens that oscillate."""
    figure = new_figure(12, 8.4)
    panels = figure.subplots(3, 3, sharey=True)
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if "-growing" not in row["part"]:
            lines.setdefault((row["norm"], row["family"], row["energy"], row["D"]), []).append(row)
    colours = dict(zip([*ENERGIES, "quadratic"], ("C0", "C3", "0.5"), strict=True))
    styles = {16: "-", 32: "--", 64: ":"}
    for (norm, family, energy, D), line in lines.items():
        axis = panels[NORMS.index(norm), list(FAMILIES).index(family)]
        axis.plot(
            range(len(line)),
            [row["oscillating"] for row in line],
            styles[D],
            marker="o",
            markersize=3,
            color=colours[energy],
            label=f"{energy}, D = {D}",
        )
        axis.set_xticks(range(len(line)), [f"{row['value']:g}" for row in line])
    for norm, row_of in zip(NORMS, panels, strict=True):
        for (_, _, label), axis in zip(FAMILIES.values(), row_of, strict=True):
            axis.set(ylim=(-0.03, 1.03), xlabel=label)
            axis.set_title({"none": "no norm"}.get(norm, norm), fontsize=10)
            axis.grid(alpha=0.3)
        row_of[0].set_ylabel("tokens that oscillate")
        row_of[0].legend(fontsize=7)
    panels[1, 2].legend(fontsize=7)
    save(figure, to / "oscillation", ("png",))


def draw_traces(to: Path, traced: list[Any]) -> None:
    """Ways of three tokens each, along the direction in which they move most, and their spectra."""
    figure = new_figure(12, 5.4)
    panels = figure.subplots(2, len(traced))
    for (row, ways, powers), (above, below) in zip(traced, panels.T, strict=True):
        for way, power in zip(ways, powers, strict=True):
            above.plot(way[: min(400, len(way))], linewidth=1)
            below.plot(np.arange(1, len(power)) / len(way), power[1:] / power.max(), linewidth=1)
        above.set_title(
            f"{row['energy']}, {row['norm']}, {row['family']} {row['value']:g}", fontsize=9
        )
        above.set(xlabel="step", ylabel="u, along one direction")
        below.set(
            xlabel="turns per step", ylabel="power", xscale="log", yscale="log", ylim=(1e-6, 2)
        )
        above.grid(alpha=0.3)
        below.grid(alpha=0.3)
    save(figure, to / "periods", ("png",))


def draw_settling(to: Path, rows: list[dict[str, Any]]) -> None:
    """Median distances to the end, by position."""
    ways = [
        (row["model"], way, found)
        for row in rows
        for way, found in row.items()
        if isinstance(found, dict)
    ]
    figure = new_figure(4 * len(ways), 3.8)
    panels = figure.subplots(1, len(ways), sharey=True)
    for (model, way, found), axis in zip(ways, panels, strict=True):
        for part, curve in enumerate(zip(*found["distance to the end"], strict=True)):
            colour = str(0.85 - 0.11 * part)
            axis.plot(found["at step"], curve, color=colour, label=f"eighth {part + 1}")
        axis.set(xscale="log", yscale="log", xlabel="step")
        axis.set_title(f"{model}: {way}", fontsize=9)
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("distance of g to its end / |g|")
    panels[0].legend(title="positions", fontsize=7, title_fontsize=7)
    save(figure, to / "settling", ("png",))


if __name__ == "__main__":
    main()
