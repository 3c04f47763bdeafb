"""The paper's figure of transitions on ListOps: how large must a model be to learn it?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..check import check_choice
from ..dynamics.figures import new_figure, save
from ..train.overrides import replace
from ..train.presets import LISTOPS_WIDTHS, PRESETS
from .common import Case, Row, carry_out, failures, grouped, markdown, means, spread, write_text
from .fit import LEVEL, Transition, find_transition, interpolated, shown
from .training import screen

MODELS: dict[str, tuple[str, int]] = {
    "ff1": ("nrgpt_ff1", 4),
    "ff1-8d": ("nrgpt_ff1", 8),
    "ff2w": ("nrgpt_ff2w", 4),
    "rgpt-parallel": ("rgpt_parallel", 4),
}
"""Preset's model and hidden factor. (The paper's appendix found FF1 to compete with 8 D only.)"""
TITLES = {
    "ff1": "NRGPT FF1, hidden 4D",
    "ff1-8d": "NRGPT FF1, hidden 8D",
    "ff2w": "NRGPT FF2W",
    "rgpt-parallel": "RGPT-parallel",
}
COLOURS = {"ff1": "C0", "ff1-8d": "C2", "ff2w": "C1", "rgpt-parallel": "black"}

QUICK: dict[str, Any] = {
    "iterations": 60, "batch": 16, "model.context": 32, "log_every": 20, "eval_every": 60,
    "eval_batches": 2, "save_every": 60, "optimiser.warmup": 10, "data.listops.train": 5_000,
    "data.listops.validation": 200, "data.listops.test": 50, "precision": "fp32",
}  # fmt: skip


def widths_of(recipe: str) -> tuple[int, ...]:
    """Our recipe has 4 heads, which must divide the width: the paper's widths, rounded."""
    if recipe == "paper":
        return LISTOPS_WIDTHS
    return tuple(dict.fromkeys(4 * round(width / 4) for width in LISTOPS_WIDTHS))


def cases(recipe: str = "ours", seeds: int = 3, quick: bool = False) -> list[Case]:
    check_choice("recipe", recipe, ["ours", "paper"])
    form = "_paper" if recipe == "paper" else ""
    found = []
    for modulus in (10,) if quick else (10, 20):
        for answers in ("steps", "direct"):
            for name, (kind, hidden) in MODELS.items():
                for width in (8, 16, 32) if quick else widths_of(recipe):
                    changes = {
                        "data.listops.numbers": modulus,
                        "data.listops.modulus": modulus,
                        "data.listops.answers": answers,
                        "model.vocab_size": 7 + modulus,
                        "model.width": width,
                        "model.hidden_factor": hidden,
                    }
                    if recipe == "ours":
                        changes["precision"] = "bf16"  # the same on every machine
                    cfg = replace(PRESETS[f"listops_{kind}{form}"](), changes)
                    cfg = replace(cfg, QUICK) if quick else cfg
                    labels = {"recipe": recipe, "modulus": modulus, "answers": answers}
                    short = f"{recipe}-mod{modulus}-{answers}-{name}-w{width}"
                    found += [
                        Case(
                            f"{short}-s{seed}",
                            replace(cfg, {"seed": seed}),
                            {**labels, "model": name},
                        )
                        for seed in range(seeds)
                    ]
    return found


def reproduce(cases: Sequence[Case], to: Path, **options: Any) -> list[Path]:
    rows = carry_out(cases, to, **options)
    files = []
    for recipe, modulus, answers in grouped(rows, "recipe", "modulus", "answers"):
        own = [
            row
            for row in rows
            if (row["recipe"], row["modulus"], row["answers"]) == (recipe, modulus, answers)
        ]
        if all(transition_of(of_model) is None for of_model in grouped(own, "model").values()):
            name = f"modulo {modulus}, {answers}, recipe: {recipe}"
            screen.print(f"no figure of {name}: a transition needs three sizes of a model")
            continue
        figure = transition_figure(own, f"modulo {modulus}, {answers}, recipe: {recipe}")
        files += save(figure, to / f"transition-{recipe}-mod{modulus}-{answers}", ("png",))
    return [*files, write_text(to / "transitions.md", transition_table(rows))]


def accuracies(rows: Sequence[Row], count: str = "parameters") -> dict[int, list[float]]:
    groups = grouped(rows, count)
    return {size: [row["accuracy"] for row in own] for (size,), own in sorted(groups.items())}


def transition_of(rows: Sequence[Row], count: str = "parameters") -> Transition | None:
    found = accuracies(rows, count)
    return find_transition(found) if len(found) >= 3 else None


def transition_figure(rows: Sequence[Row], title: str) -> Any:
    """Accuracies with their fits and the transitions (stars) above, losses below."""
    models = [name for name in MODELS if grouped(rows, "model").get((name,))]
    figure = new_figure(3.6 * len(models) + 0.6, 6.4)
    axes = figure.subplots(2, len(models), squeeze=False, sharex=True, sharey="row")
    for (above, below), name in zip(axes.T, models, strict=True):
        own = grouped(rows, "model")[name,]
        sizes = np.array([row["parameters"] for row in own], float)
        colour = COLOURS[name]
        above.plot(sizes, [row["accuracy"] for row in own], "o", color=colour, alpha=0.5)
        transition = transition_of(own)
        if transition is not None:
            draw_transition(above, transition, sizes)
        above.axhline(LEVEL, color="grey", linewidth=0.8, linestyle=":")
        above.set(title=TITLES[name], xscale="log", ylim=(-0.03, 1.03))
        for key, marker, style in (("train_loss", "s", "--"), ("val_loss", "o", "-")):
            below.plot(sizes, [row[key] for row in own], marker, color=colour, alpha=0.3)
            label = "training" if key == "train_loss" else "validation"
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
            (-8, 8),  # above what smaller models reach: nothing else is there
            textcoords="offset points",
            horizontalalignment="right",
        )


def transition_table(rows: Sequence[Row]) -> str:
    """One line for each model and task."""
    labels = ("recipe", "modulus", "answers", "model")
    order = list(MODELS).index
    groups = grouped(rows, *labels)
    lines = []
    for recipe, modulus, answers, name in sorted(groups, key=lambda g: (*g[:3], order(g[3]))):
        own = groups[recipe, modulus, answers, name]
        largest = max(row["parameters"] for row in own)
        at_largest = [row["accuracy"] for row in own if row["parameters"] == largest]
        seeds = sorted({len(of_size) for of_size in grouped(own, "parameters").values()})
        lines.append(
            [
                recipe,
                modulus,
                answers,
                TITLES[name],
                transition_of(own) or "too few sizes",
                transition_of(own, "parameters_untied") or "too few sizes",
                shown(interpolated(accuracies(own))),
                spread(at_largest, 3),
                " or ".join(map(str, seeds)),
                f"{own[0]['iterations']:,}",
            ]
        )
    headings = [
        "recipe", "modulo", "answers", "model", "80 % at (95 % interval)", "the same, untied",
        "80 % by interpolation", "accuracy of the largest", "seeds", "iterations",
    ]  # fmt: skip
    said = (
        "# ListOps transitions\n\nParameters at which a logistic fit of the accuracy crosses "
        f"{LEVEL:.0%}, with a 95 % interval from resampling the seeds of each size (one alone "
        "varies as seeds of other sizes do); and where straight lines between the means of the "
        "sizes first do, for accuracies that no logistic curve describes.\n\n"
    )
    return said + markdown(headings, lines) + failures(rows)
