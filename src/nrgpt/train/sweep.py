"""Many runs of one preset: a grid, or a search with Optuna.

Each run has an ordinary run folder, so a sweep that was stopped resumes when started again: results
of finished runs are read, unfinished runs go on, the others follow.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from ..check import check_choice, suggestion
from ..dynamics.figures import new_figure, save
from ..files import check_ours, write_atomically
from .config import TrainConfig
from .faults import DIVERGED, Interrupt, TrainingError
from .loop import train, train_packed
from .overrides import known_names, override, parse
from .presets import GRIDS
from .runs import check_config, is_finished, read_result
from .search import DATABASE, RANGE, Row, read_range, search
from .updates import by_shape

screen = Console(markup=False, emoji=False)
OBJECTIVE = "val_loss_full"
ESTIMATE = "best_val_loss_estimate"
RESULTS = "results.jsonl"
Choices = dict[str, list[str]]


def run_sweep(
    name: str,
    cfg: TrainConfig,
    assignments: Sequence[str],
    folder: Path,
    *,
    grid: str | None = None,
    trials: int | None = None,
    storage: str | None = None,
    packed: int | None = None,
) -> list[Row]:
    """Carry out all runs; returns, prints and plots a row for each. ``packed`` trains that many
    runs of one shape together; None trains them one by one."""
    refuse_other_folders(folder)
    choices = read_choices(assignments)
    if grid is not None:
        check_choice("grid", grid, GRIDS)
        choices = {key: list(map(str, values)) for key, values in GRIDS[grid].items()} | choices
    if packed is not None and trials is not None:
        raise ValueError("packed: a search learns from one run after the other; leave out --trials")
    if trials is None:
        rows = run_grid(cfg, choices, folder, packed, skip_impossible=grid is not None)
    else:
        rows = run_search(name, cfg, choices, folder, trials, storage)
    rows.sort(key=lambda row: math.inf if (loss := loss_of(row)) is None else loss)
    write_atomically(folder / RESULTS, "".join(json.dumps(row) + "\n" for row in rows))
    varied = [key for key, values in choices.items() if len(values) > 1 or RANGE.match(values[0])]
    show(rows, varied)
    plot(rows, varied, folder / "sweep.png")
    return rows


def loss_of(row: Row) -> float | None:
    """What runs are compared by: the loss on the whole split or, with final_evaluation = false, the
    best of the estimates made while training. None for a run that has no loss."""
    loss: float | None = row[OBJECTIVE] if OBJECTIVE in row else row[ESTIMATE]
    return loss


def refuse_other_folders(folder: Path) -> None:
    """A file of somebody else may have the name of ours, and would be overwritten."""
    is_sweep = check_ours(folder / DATABASE).exists() or any(folder.glob("*/config.json"))
    for name in (RESULTS, "sweep.png"):
        if check_ours(folder / name).exists() and not is_sweep:
            raise ValueError(
                f"{folder} holds {name} but no runs, so it is not of a sweep; choose a new or an "
                "empty folder with --to"
            )


def read_choices(assignments: Sequence[str]) -> Choices:
    """model.width=32,64 -> {"model.width": ["32", "64"]}; a range such as log(1,2) is one value."""
    choices = {}
    for assignment in assignments:
        key, equals, values = assignment.lstrip("-").partition("=")
        if not equals or not values:
            raise ValueError(f"{assignment!r}: write field=value,value,... or field=log(low,high)")
        choices[key] = [values] if RANGE.fullmatch(values) else split_values(values)
        if not choices[key]:
            raise ValueError(f"{assignment!r}: there is no value between the commas")
        if RANGE.fullmatch(values):
            read_range(key, values)
    return choices


def split_values(text: str) -> list[str]:
    """Split at commas outside parentheses: ("max","min"),("sum",) are two tuples."""
    return [value for value in re.split(r",(?![^()]*\))", text) if value]


def changed(cfg: TrainConfig, chosen: Row) -> TrainConfig:
    return override(cfg, [f"{key}={value}" for key, value in chosen.items()])


def run_one(cfg: TrainConfig, chosen: Row, folder: Path) -> Row:
    """The row of one run, read from its folder if it is finished. A run that diverges for good
    gives a row without a loss, and the sweep goes on."""
    own = changed(cfg, chosen)
    if is_finished(own, folder):
        check_config(own, folder)
        return {**chosen, **read_result(folder), "run": folder.name}
    try:
        return {**chosen, **train(own, folder), "run": folder.name}
    except TrainingError as error:
        if error.code != DIVERGED:
            raise
        screen.print(f"{folder.name}: {error}", highlight=False)
        return {**chosen, OBJECTIVE: None, "error": str(error), "run": folder.name}


def run_grid(
    cfg: TrainConfig, choices: Choices, folder: Path, packed: int | None, skip_impossible: bool
) -> list[Row]:
    for key, values in choices.items():
        if RANGE.fullmatch(values[0]):
            raise ValueError(f"{key}={values[0]}: a range needs a search; add --trials N")
    combinations = [
        dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
    ]
    # Errors come before the first run starts. The paper's grids hold impossible combinations, such
    # as width 380 with 8 heads: those are left out.
    runs: list[tuple[TrainConfig, Path]] = []
    possible, refused = [], []
    for chosen in combinations:
        try:
            runs.append((changed(cfg, chosen), folder / folder_name(chosen)))
            possible.append(chosen)
        except ValueError as error:
            refused.append(error)
    if refused and (not skip_impossible or not possible):
        raise refused[0]
    if refused:
        count = f"{len(refused):,} of {len(combinations):,} combinations are left out"
        screen.print(f"{count}, the first because of {refused[0]}", highlight=False)
    unfinished = [(own, run) for own, run in runs if not is_finished(own, run)]
    for pack in by_shape(unfinished, lambda _: packed) if packed else ():
        screen.print(f"{len(pack)} runs together: {', '.join(run.name for _, run in pack)}")
        with Interrupt().watching() as interrupt:
            try:
                train_packed([own for own, _ in pack], [run for _, run in pack])
            except TrainingError as error:
                if error.code != DIVERGED:  # run_one will deal with the run that diverged
                    raise
        interrupt.heed()
    rows = []
    for number, (chosen, (_, run)) in enumerate(zip(possible, runs, strict=True), 1):
        screen.print(f"run {number} of {len(runs)}: {run.name}", highlight=False)
        with Interrupt().watching() as interrupt:
            rows.append(run_one(cfg, chosen, run))
        if number < len(runs):
            interrupt.heed()
    return rows


def run_search(
    name: str, cfg: TrainConfig, choices: Choices, folder: Path, trials: int, storage: str | None
) -> list[Row]:
    """Optuna proposes the values. What cannot be combined is passed over, and counted."""
    known = known_names(cfg)
    for key in choices:
        if key not in known:
            raise ValueError(f"there is no field {key!r}{suggestion(key, known)}")

    def carry_out(chosen: Row) -> tuple[Row, float | None]:
        run = folder / folder_name(chosen)
        try:
            changed(cfg, chosen)
        except ValueError as error:
            row = {**chosen, OBJECTIVE: None, "error": str(error), "impossible": True}
            return {**row, "run": run.name}, None
        row = run_one(cfg, chosen, run)
        return row, loss_of(row)

    rows = search(name, choices, carry_out, folder, seed=cfg.seed, trials=trials, storage=storage)
    impossible = [row["error"] for row in rows if row.get("impossible")]
    if impossible and len(impossible) == len(rows):
        raise ValueError("no trial was possible: " + "; ".join(dict.fromkeys(impossible)))
    if impossible:
        screen.print(f"{len(impossible)} of {len(rows)} trials were impossible: {impossible[0]}")
    return rows


LONGEST = 200
"""Bytes of a folder's name; most file systems take 255."""


def folder_name(parameters: dict[str, Any]) -> str:
    """The folder of a run inside that of its sweep: never a path that leads elsewhere."""
    named = ",".join(f"{key}={value}" for key, value in sorted(parameters.items())) or "run"
    name = quote(named, safe=" ,=()[]{}'\"+*^&@!;~")
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - 9]}-{hashlib.sha256(named.encode()).hexdigest()[:8]}"


def show(rows: list[Row], varied: list[str]) -> None:
    table = Table("run", *varied, "validation loss", "parameters")
    for row in rows:
        last = ["not possible" if row.get("impossible") else "not finite", ""]
        if (loss := loss_of(row)) is not None:
            about = "" if OBJECTIVE in row else " (estimate)"
            last = [f"{loss:.4f}{about}", f"{row['parameters']['total']:,}"]
        table.add_row(row["run"], *(str(row[key]) for key in varied), *last)
    screen.print(table)


def plot(rows: list[Row], varied: list[str], path: Path) -> None:
    """Loss against each field that was varied, if matplotlib is installed."""
    rows = [row for row in rows if loss_of(row) is not None]
    if not varied or not rows:
        return
    try:
        figure = new_figure(4 * len(varied), 3.5)
    except ValueError:
        return
    axes = figure.subplots(1, len(varied), squeeze=False, sharey=True)
    for axis, key in zip(axes[0], varied, strict=True):
        values = [parse(str(row[key])) for row in rows]
        is_numeric = all(isinstance(v, int | float) for v in values)
        axis.plot(
            values if is_numeric else list(map(str, values)), [loss_of(row) for row in rows], "o"
        )
        if is_numeric and min(values) > 0 and max(values) / min(values) > 20:
            axis.set_xscale("log")
        axis.set(xlabel=key, ylabel="validation loss (nats)")
        axis.grid(alpha=0.3)
    save(figure, path, ["png"])
