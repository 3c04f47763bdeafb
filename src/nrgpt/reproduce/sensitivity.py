"""How much a model's loss depends on its hyperparameters: the dots of the paper's figure of
Shakespeare, as a figure of their own and as numbers."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ..dynamics.figures import new_figure
from ..train.presets import GRIDS
from . import tables
from .compared import COLOURS, TITLES, in_order
from .tables import Column, Row, grouped, of_first

VARIED: dict[str, tuple[Any, ...]] = {
    "optimiser.lr": GRIDS["shakespeare"]["optimiser.lr"],
    "model.heads": GRIDS["shakespeare"]["model.heads"],
    "model.steps": GRIDS["shakespeare"]["model.steps"],
    "model.hidden_factor": (2, 4, 8),
}
"""What the paper varies, one at a time around USUAL, for each model and width."""
WIDTHS = (64, 128, 256)

USUAL: dict[str, Any] = {
    "optimiser.lr": 1e-3, "model.heads": 1, "model.steps": 8, "model.hidden_factor": 4,
}  # fmt: skip

CONFIGURATION = ("model", "width", "heads", "steps", "hidden_factor", "lr", "iterations")
"""The fields of rows that tell configurations apart."""


def variations(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and changes: the usual configuration, and those with one field changed. (The steps of a
    GPT are its layers, which the paper leaves alone.)"""
    found = [("", USUAL)]
    for field, values in VARIED.items():
        short = field.rpartition(".")[2]
        for value in values:
            is_new = value != USUAL[field] and not (kind == "gpt" and field == "model.steps")
            found += [(f"-{short}{value:g}", USUAL | {field: value})] if is_new else []
    return found


def of_configurations(rows: Sequence[Row]) -> list[float]:
    """The mean loss of each configuration, the best first."""
    groups = grouped(rows, *CONFIGURATION).values()
    return sorted(statistics.fmean(row["val_loss_full_best"] for row in own) for own in groups)


def sensitivity_figure(rows: Sequence[Row], recipe: str) -> Any:
    """Dots: the mean of each configuration, beside one another by model. Bars: from the best to the
    median one, as the paper shows the better half."""
    figure = new_figure(9, 4.2)
    axis = figure.subplots()
    widths = sorted({row["width"] for row in rows})
    models = [kind for kind in TITLES if any(row["model"] == kind for row in rows)]
    for i, kind in enumerate(models):
        for place, width in enumerate(widths):
            own = [row for row in rows if (row["model"], row["width"]) == (kind, width)]
            losses = of_configurations(own)
            if not losses:
                continue
            x = place + 0.13 * (i - (len(models) - 1) / 2)
            label = TITLES[kind] if place == 0 else None
            axis.plot([x] * len(losses), losses, ".", color=COLOURS[kind], alpha=0.5, label=label)
            better_half = [losses[0], statistics.median(losses)]
            axis.plot([x, x], better_half, color=COLOURS[kind], linewidth=5, alpha=0.4)
    axis.set_xticks(range(len(widths)), [f"D = {width}" for width in widths])
    axis.set(ylabel="validation loss (nats, best checkpoint)")
    axis.set_title(f"Shakespeare, one hyperparameter changed at a time, recipe: {recipe}")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, ncols=2)
    return figure


def spread_table(rows: Sequence[Row], recipe: str) -> str:
    """How much the loss depends on hyperparameters, a line for each model and width."""
    columns: dict[str, Column] = {
        "model": lambda own: TITLES[own[0]["model"]],
        "D": of_first("{width}"),
        "configurations": lambda own: len(of_configurations(own)),
        "seeds": lambda own: len({row["seed"] for row in own}),
        "best": of_losses(min),
        "best to median": of_losses(lambda losses: statistics.median(losses) - losses[0]),
        "best to worst": of_losses(lambda losses: losses[-1] - losses[0]),
        "standard deviation": of_losses(statistics.pstdev),
        "by learning rate": lambda own: range_over(own, "lr"),
        "by heads": lambda own: range_over(own, "heads"),
        "by steps": lambda own: range_over(own, "steps"),
        "by hidden size": lambda own: range_over(own, "hidden_factor"),
    }
    said = (
        f"# Shakespeare, sensitivity, recipe: {recipe}\n\nLosses in nats on the whole validation "
        "split, at the best checkpoint, over configurations that change one hyperparameter at a "
        "time. The last columns: the range of the loss when only that one changes.\n\n"
    )
    groups = [own for _, own in in_order(grouped(rows, "model", "width"))]
    return said + tables.table(columns, groups) + tables.failures(rows)


def of_losses(number: Callable[[list[float]], float]) -> Column:
    return lambda own: f"{number(of_configurations(own)):.4f}"


def range_over(rows: Sequence[Row], field: str) -> str:
    """Between the best and the worst value of a field, with the others as usual."""
    fields = ("lr", "heads", "steps", "hidden_factor")
    usual = {name: statistics.mode(row[name] for row in rows) for name in fields}
    others = [name for name in fields if name != field]
    own = [row for row in rows if all(row[name] == usual[name] for name in others)]
    losses = of_configurations(own)
    return f"{losses[-1] - losses[0]:.4f}" if len(losses) > 1 else "-"
