"""Shakespeare's characters: losses against parameters, how much they depend on hyperparameters, the
table of best configurations, whether models overfit in long training, and our recipe for NRGPT and
for baselines."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..dynamics.figures import new_figure, save
from ..measure.loss import split_loss
from ..train.distributed import device_named
from ..train.overrides import replace
from ..train.presets import GRIDS, MODELS, PRESETS, SHAKESPEARE_ROWS
from ..train.runs import load_run
from ..train.speed import autocast
from . import tables, texts
from .common import Case, carry_out, suffix_of
from .compared import COLOURS, TITLES, in_order
from .records import Record, read
from .sensitivity import CONFIGURATION, sensitivity_figure, spread_table, variations
from .sensitivity import WIDTHS as SENSITIVE_WIDTHS
from .tables import Column, Row, grouped, means, of_first, spread, spread_of, write_text

WIDTHS: tuple[int, ...] = GRIDS["shakespeare"]["model.width"]
RATES: tuple[float, ...] = GRIDS["shakespeare"]["optimiser.lr"]

PRECISION = {"precision": "bf16"}
"""The same numbers on every machine."""

SCALING: dict[str, dict[str, Any]] = {
    "ours": {"model.steps": 8, "iterations": 4_000},
    "paper": {"model.steps": 8, "model.heads": 1},
}
"""Ours with half of its usual iterations, 65 epochs, after which wide models begin to overfit."""

LONG: dict[str, dict[str, Any]] = {
    "ours": {"model.width": 256, "model.steps": 6, "iterations": 20_000, "eval_every": 500},
    "paper": {
        "model.width": 512, "model.steps": 6, "model.heads": 1, "optimiser.lr": 3e-4,
        "eval_every": 1_000,
    },
}  # fmt: skip
"""The same for all models: 326 epochs in our recipe, 653 in the paper's, there at the size of the
largest row of its table."""

OURS = {
    "small": {"nrgpt_ff2w": 128, "nrgpt_certified": 136, "rgpt_parallel": 128, "gpt": 48},
    "wide": {"nrgpt_ff2w": 256, "nrgpt_certified": 256, "rgpt_parallel": 256, "gpt": 96},
}
"""Widths that give at most a quarter of a million parameters, and at most one million."""
REGULARISED: dict[str, dict[str, Any]] = {
    "small": {},
    "wide": {"model.heads": 8, "model.dropout": 0.15},
}
"""Changes to the recipe at these sizes. (The dropout is the better one of those tried.)"""
LEARNED_ALPHA = {"model.learn_alpha": True}
"""For the certified model. Its energy provably falls as long as no alpha is negative. Alpha is
learned, so the row of each run says whether the certificate holds."""

QUICK: dict[str, Any] = {
    "iterations": 30, "optimiser.warmup": 5, "batch": 4, "model.context": 32, "log_every": 10,
    "eval_every": 10, "eval_batches": 2, "save_every": 10, "model.steps": 3, "precision": "fp32",
}  # fmt: skip


def cases(recipe: str = "ours", seeds: int = 3, quick: bool = False) -> list[Case]:
    """All parts. Only our recipe has the parts ``ours_...``, and only the paper's has ``table``."""
    suffix = suffix_of(recipe)
    found: list[Case] = []

    def plan(part: str, kind: str, changes: Mapping[str, Any], rate: str = "") -> None:
        cfg = replace(PRESETS[f"shakespeare_{kind}{suffix}"](), {**PRECISION, **changes})
        if quick:  # every part and model, two widths of each, all of them tiny
            shown = {"scaling": (64, 128), "sensitivity": (64,)}.get(part, (cfg.model.width,))
            if cfg.model.width not in shown:
                return
            steps = 2 if cfg.model.steps == 3 else 3  # so that they differ
            cfg = replace(cfg, {**QUICK, "model.width": 16 if cfg.model.width <= 64 else 32})
            cfg = replace(cfg, {"model.steps": steps})
        labels = {"part": part, "recipe": recipe, "model": kind}
        name = f"{part}-{recipe}-{kind}-w{cfg.model.width}{rate}"
        found.extend(Case(name, cfg, labels).with_seeds(seeds))

    rates: dict[str, dict[str, Any]] = {"": {}}
    if recipe == "paper":
        rates = {f"-lr{lr:g}": {"optimiser.lr": lr} for lr in RATES}
    for kind in (kind for kind in MODELS if kind in SHAKESPEARE_ROWS):
        for width, rate in itertools.product(WIDTHS, rates):
            changes = {"model.width": width, **SCALING[recipe], **rates[rate]}
            plan("scaling", kind, changes, rate)
        plan("long", kind, LONG[recipe])
        if recipe == "paper":
            plan("table", kind, {})
            for width, (name, change) in itertools.product(SENSITIVE_WIDTHS, variations(kind)):
                plan("sensitivity", kind, {"model.width": width, **change}, name)
    for size, widths in OURS.items() if recipe == "ours" else ():
        for kind, width in widths.items():
            certified = LEARNED_ALPHA if kind == "nrgpt_certified" else {}
            plan(f"ours_{size}", kind, {"model.width": width, **REGULARISED[size], **certified})
    return found


def measure(case: Case, run: Path, record: Record, *, quick: bool) -> Row:
    """The loss on the whole split at the best checkpoint, and texts for parts with text metrics."""
    device = device_named("auto")
    best = load_run(run, device=device)
    loss = record.read("result.json")["val_loss_full"]
    if best.step != case.cfg.iterations:
        with autocast(case.cfg, torch.device(device)):
            loss = split_loss(best.model, best.dataset(verify=False).tokens("val")).loss
    row: Row = {"val_loss_full_best": loss, "val_loss_full_best_step": best.step}
    row["hidden_factor"] = case.cfg.model.hidden_factor
    if case.labels["model"] == "nrgpt_certified":
        row["certificate"] = bool(best.model.certificate())
    if case.labels["part"] == "table" or case.labels["part"].startswith("ours"):
        texts.keep_texts(best, record, *texts.amount(quick))
    return row


def reproduce(
    cases: Sequence[Case],
    to: Path,
    *,
    judge: str | None = "gpt2",
    quick: bool = False,
    **options: Any,
) -> list[Path]:
    rows = carry_out(cases, to, partial(measure, quick=quick), **options)
    rows = texts.with_metrics(rows, to, judge, quick)
    files = []
    for part, recipe in grouped(rows, "part", "recipe"):
        own = [row for row in rows if (row["part"], row["recipe"]) == (part, recipe)]
        if part == "scaling":
            files += save(scaling_figure(own, recipe), to / f"scaling-{recipe}", ("png",))
        if part == "long":
            figure = overfitting_figure(own, read(to))
            files += save(figure, to / f"overfitting-{recipe}", ("png",))
        if part == "sensitivity":
            files += save(sensitivity_figure(own, recipe), to / f"sensitivity-{recipe}", ("png",))
            files.append(write_text(to / f"spread-{recipe}.md", spread_table(own, recipe)))
        files.append(write_text(to / f"{part}-{recipe}.md", loss_table(own, part, recipe)))
    return files


def scaling_figure(rows: Sequence[Row], recipe: str) -> Any:
    """Dots: all runs. Lines: at each size, the learning rate with the lowest mean validation loss.
    The panel on the right shows which models overfit: those with the higher validation loss at
    equal training loss."""
    figure = new_figure(15, 4.2)
    from matplotlib.ticker import MaxNLocator

    panels = [
        ("parameters", "train_loss", "training (estimate, at the end)"),
        ("parameters", "val_loss_full_best", "validation (whole split, best checkpoint)"),
        ("train_loss", "val_loss", "validation against training, at the end"),
    ]
    for axis, (x, y, title) in zip(figure.subplots(1, 3), panels, strict=True):
        for (kind,), own in in_order(grouped(rows, "model")):
            colour = COLOURS[kind]
            axis.plot([row[x] for row in own], [row[y] for row in own], ".", alpha=0.3, c=colour)
            best = best_configurations(own)
            sizes, values = means(best, "parameters", y)
            places = sizes if x == "parameters" else means(best, "parameters", x)[1]
            axis.plot(places, values, "-o", label=TITLES[kind], color=colour)
        axis.set(title=title, ylabel="loss (nats)")
        if x == "parameters":
            axis.set(xscale="log", xlabel="parameters")
        else:
            axis.set(xlabel="training loss (nats)", yscale="log", ylabel="validation loss (nats)")
            axis.yaxis.set_major_locator(MaxNLocator(6))
            axis.yaxis.set_major_formatter("{x:.1f}")
            axis.yaxis.set_minor_formatter("")
        axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.suptitle(f"Shakespeare, recipe: {recipe}")
    return figure


def best_configurations(rows: Sequence[Row]) -> list[Row]:
    """For each size, the runs with the learning rate that is best on average."""

    def mean_loss(runs: list[Row]) -> float:
        return statistics.fmean(row["val_loss_full_best"] for row in runs)

    sizes = grouped(rows, "parameters").values()
    return [row for own in sizes for row in min(grouped(own, "lr").values(), key=mean_loss)]


def overfitting_figure(rows: Sequence[Row], records: Mapping[str, Record]) -> Any:
    """Estimates over the iterations, and validation against training loss. The limits show where
    most models differ; the validation loss of a wide GPT leaves the picture."""
    figure = new_figure(15, 4.2)
    left, middle, right = figure.subplots(1, 3)
    groups = in_order(grouped(rows, "model"))
    least = min((row["best_val_loss"] for _, own in groups for row in own), default=0.0)
    for (kind,), own in groups:
        for row in own:
            metrics = records[row["case"]].read("metrics.jsonl")
            entries = [entry for entry in metrics if "val_loss" in entry]
            steps, training, validation = (
                [entry[key] for entry in entries] for key in ("step", "train_loss", "val_loss")
            )
            look = {"color": COLOURS[kind], "label": TITLES[kind] if row is own[0] else None}
            left.plot(steps, training, **look)
            middle.plot(steps, validation, **look)
            right.plot(training, validation, ".-", **look)
    left.set(title="training", xlabel="iteration", ylabel="loss (nats)")
    middle.set(title="validation", xlabel="iteration")
    right.set(title="validation against training", xlabel="training loss")
    for axis in (middle, right):
        axis.set_ylim(least - 0.05, least + 0.6)
    right.invert_xaxis()  # so that time runs to the right
    for axis in (left, middle, right):
        axis.grid(alpha=0.25)
    left.legend(frameon=False)
    return figure


def loss_table(rows: Sequence[Row], part: str, recipe: str) -> str:
    """One line for each configuration, means and standard deviations over seeds."""
    measured = [row for row in rows if "metrics" in row]
    columns: dict[str, Column] = {
        "model": lambda own: TITLES[own[0]["model"]],
        "D": of_first("{width}"),
        **{name: of_first(f"{{{name}}}") for name in ("heads", "steps", "lr", "iterations")},
        **({"hidden": of_first("{hidden_factor}D")} if part == "sensitivity" else {}),
        "tied": of_first("{parameters_tied:,}"),
        "untied": of_first("{parameters_untied:,}"),
        **tables.LOSSES,
        "whole split, best checkpoint": spread_of("val_loss_full_best"),
        "gap of the estimates": lambda own: spread(
            [row["val_loss"] - row["train_loss"] for row in own]
        ),
        **texts.metric_columns(measured),
    }
    fields = [name for name in CONFIGURATION if name != "hidden_factor" or part == "sensitivity"]
    groups = grouped(rows, *fields)
    context = {row["val_loss_full_least_context"] for row in rows if "error" not in row}
    said = (
        f"# Shakespeare, {part}, recipe: {recipe}\n\nLosses in nats, mean ± standard deviation "
        'over seeds. Estimates are over random windows at the last iteration; "whole split" counts '
        f"every validation token once, with at least {', '.join(map(str, sorted(context)))} tokens "
        "before it (fewer at the start of the split), so a trained model's is lower: windows have "
        "tokens with little before them. Parameters with the embedding tied, and as if it were "
        "not.\n\n"
    )
    if measured:
        settings = measured[0]["metrics_settings"]
        said += f"Text metrics: {settings['samples']} texts of {settings['words']} words each. "
        missing = [name for name in texts.METRICS if name not in texts.columns(measured)]
        said += f"Not measured here: {', '.join(missing)}.\n\n" if missing else "\n\n"
    people = texts.people(measured, len(columns))
    lines = [own for _, own in in_order(groups)]
    return said + tables.table(columns, lines, *people) + tables.failures(rows)
