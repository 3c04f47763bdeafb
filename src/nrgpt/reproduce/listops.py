"""The paper's figure of transitions: how large must a model be to learn ListOps?"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ..dynamics.figures import new_figure, save
from ..train.overrides import replace
from ..train.presets import LISTOPS_WIDTHS, PRESETS
from .common import Case, carry_out, suffix_of
from .fit import LEVEL, Transition, find_transition, interpolated, shown
from .tables import Column, Row, failures, grouped, means, of_first, spread, table, write_text
from .training import screen

MODELS = {
    "ff1": ("nrgpt_ff1", 4, "NRGPT FF1, hidden 4D", "C0"),
    "ff1-8d": ("nrgpt_ff1", 8, "NRGPT FF1, hidden 8D", "C2"),
    "ff2w": ("nrgpt_ff2w", 4, "NRGPT FF2W", "C1"),
    "ff2": ("nrgpt_ff2", 4, "NRGPT FF2", "C4"),
    "settled": ("nrgpt_settled", 2, "NRGPT, settled", "C3"),
    "rgpt-parallel": ("rgpt_parallel", 4, "RGPT-parallel", "black"),
}
"""Model of the preset, hidden factor, title and colour. (In the paper's appendix FF1 competes only
with a hidden size of 8 D. FF2 is its "residual version", said to be the best on ListOps. Settled
models are ours.)"""
PAPERS = {"ff1": 24_000, "ff2w": 29_800, "rgpt-parallel": 23_000}
"""Parameters at the transitions in the paper's figure. Its text says modulo 20; the authors' code
is modulo 10, with steps."""
LABELS = ("recipe", "modulus", "answers")
LINES = (("training", "train_loss", "s", "--"), ("validation", "val_loss", "o", "-"))

QUICK: dict[str, Any] = {
    "iterations": 60, "batch": 16, "model.context": 32, "log_every": 20, "eval_every": 60,
    "eval_batches": 2, "save_every": 60, "optimiser.warmup": 10, "data.listops.train": 5_000,
    "data.listops.validation": 200, "data.listops.test": 50, "precision": "fp32",
}  # fmt: skip


def widths_of(recipe: str) -> tuple[int, ...]:
    """The paper's widths. Ours are rounded to multiples of 4, the number of heads."""
    if recipe == "paper":
        return LISTOPS_WIDTHS
    return tuple(dict.fromkeys(4 * round(width / 4) for width in LISTOPS_WIDTHS))


def cases(recipe: str = "ours", seeds: int = 3, quick: bool = False) -> list[Case]:
    suffix, found = suffix_of(recipe), []
    moduli, widths = ((10,), (8, 16, 32)) if quick else ((10, 20), widths_of(recipe))
    models = [name for name in MODELS if recipe == "ours" or name != "settled"]
    for modulus, answers, name, width in product(moduli, ("steps", "direct"), models, widths):
        kind, hidden, *_ = MODELS[name]
        changes: dict[str, Any] = {
            "data.listops.numbers": modulus,
            "data.listops.modulus": modulus,
            "data.listops.answers": answers,
            "model.vocab_size": 7 + modulus,
            "model.width": width,
            "model.hidden_factor": hidden,
        }
        if recipe == "ours":
            changes["precision"] = "bf16"  # the same on every machine
        cfg = replace(PRESETS[f"listops_{kind}{suffix}"](), changes | (QUICK if quick else {}))
        labels = {"recipe": recipe, "modulus": modulus, "answers": answers, "model": name}
        case = Case(f"{recipe}-mod{modulus}-{answers}-{name}-w{width}", cfg, labels)
        found += case.with_seeds(seeds)
    return found


def reproduce(cases: Sequence[Case], to: Path, **options: Any) -> list[Path]:
    rows = carry_out(cases, to, **options)
    files = []
    for (recipe, modulus, answers), own in grouped(rows, *LABELS).items():
        title = f"modulo {modulus}, {answers}, recipe: {recipe}"
        if all(transition_of(of_model) is None for of_model in grouped(own, "model").values()):
            screen.print(f"no figure of {title}: a transition needs three sizes of a model")
            continue
        name = f"transition-{recipe}-mod{modulus}-{answers}"
        files += save(transition_figure(own, title), to / name, ("png",))
    return [*files, write_text(to / "transitions.md", transition_table(rows))]


def accuracies(rows: Sequence[Row], count: str = "parameters") -> dict[int, list[float]]:
    groups = grouped(rows, count)
    return {size: [row["accuracy"] for row in own] for (size,), own in sorted(groups.items())}


def transition_of(rows: Sequence[Row], count: str = "parameters") -> Transition | None:
    found = accuracies(rows, count)
    return find_transition(found) if len(found) >= 3 else None


def transition_figure(rows: Sequence[Row], title: str) -> Any:
    """Above: accuracies, their fits and the transitions (stars). Below: losses."""
    models = [name for name in MODELS if grouped(rows, "model").get((name,))]
    figure = new_figure(3.6 * len(models) + 0.6, 6.4)
    axes = figure.subplots(2, len(models), squeeze=False, sharex=True, sharey="row")
    for (above, below), name in zip(axes.T, models, strict=True):
        own, (_, _, heading, colour) = grouped(rows, "model")[name,], MODELS[name]
        sizes = np.array([row["parameters"] for row in own], float)
        above.plot(sizes, [row["accuracy"] for row in own], "o", color=colour, alpha=0.5)
        transition = transition_of(own)
        if transition is not None:
            draw_transition(above, transition, sizes)
        above.axhline(LEVEL, color="grey", linewidth=0.8, linestyle=":")
        above.set(title=heading, xscale="log", ylim=(-0.03, 1.03))
        for label, key, marker, style in LINES:
            below.plot(sizes, [row[key] for row in own], marker, color=colour, alpha=0.3)
            below.plot(*means(own, "parameters", key), style, color=colour, label=label)
        below.set(xlabel="parameters", xscale="log")
        below.legend(frameon=False)
        for axis in (above, below):
            axis.grid(alpha=0.25)
            axis.xaxis.set_minor_formatter("")  # labels between powers of ten would overlap
    axes[0, 0].set_ylabel("accuracy (greedy, all tests)")
    axes[1, 0].set_ylabel("loss (nats)")
    figure.suptitle(f"ListOps, {title}")
    return figure


def draw_transition(axis: Any, transition: Transition, sizes: np.ndarray) -> None:
    grid = np.geomspace(sizes.min(), sizes.max(), 200)
    axis.plot(grid, transition.curve(grid), color="grey")
    if 0 < transition.parameters < np.inf:
        low, high = np.clip(transition.interval, sizes.min(), sizes.max())
        axis.plot([low, high], [LEVEL, LEVEL], color="goldenrod", linewidth=4, alpha=0.5)
        axis.plot(transition.parameters, LEVEL, "*", color="gold", markersize=16, mec="black")
        axis.annotate(
            f"{transition.parameters:,.0f}",
            (transition.parameters, LEVEL),
            (-8, 8),  # smaller models stay below the level, so this place is free
            textcoords="offset points",
            horizontalalignment="right",
        )


def papers_of(row: Row) -> str:
    """Where the paper's figure has the transition, if it is of this task."""
    is_shown = row["answers"] == "steps" and row["model"] in PAPERS
    return f"{PAPERS[row['model']]:,}" if is_shown else "-"


def transition_table(rows: Sequence[Row]) -> str:
    """One line for each model and task."""
    groups, order = grouped(rows, *LABELS, "model"), list(MODELS).index
    columns: dict[str, Column] = {
        "recipe": of_first("{recipe}"),
        "modulo": of_first("{modulus}"),
        "answers": of_first("{answers}"),
        "model": lambda own: MODELS[own[0]["model"]][2],
        "80 % at (95 % interval)": lambda own: transition_of(own) or "too few sizes",
        "the same, untied": lambda own: transition_of(own, "parameters_untied") or "too few sizes",
        "the paper's figure": lambda own: papers_of(own[0]),
        "80 % by interpolation": lambda own: shown(interpolated(accuracies(own))),
        "accuracy of the largest": lambda own: spread(list(accuracies(own).values())[-1], 3),
        "seeds": lambda own: " or ".join(
            map(str, sorted({len(seeds) for seeds in accuracies(own).values()}))
        ),
        "iterations": of_first("{iterations:,}"),
    }
    said = (
        "# ListOps transitions\n\nParameters at which a logistic fit of the accuracy crosses "
        f"{LEVEL:.0%}, with a 95 % interval from resampling the seeds of each size (one alone "
        "varies as seeds of other sizes do); and where straight lines between the means of the "
        "sizes first do, for accuracies that no logistic curve describes.\n\n"
    )
    in_order = sorted(groups, key=lambda group: (*group[:3], order(group[3])))
    return said + table(columns, [groups[group] for group in in_order]) + failures(rows)
