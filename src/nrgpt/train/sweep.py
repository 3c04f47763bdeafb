"""Many runs of one preset: a grid, or a search with Optuna.

Each run has an ordinary run folder, so a sweep that was stopped resumes when started again: results
of finished runs are read, unfinished runs go on, the others follow.
"""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..check import check_choice
from ..dynamics.figures import new_figure, save
from ..extras import need
from .config import TrainConfig
from .faults import DIVERGED, Interrupt, TrainingError
from .loop import train, train_packed
from .overrides import override, parse
from .presets import GRIDS
from .runs import check_config, is_finished
from .updates import by_shape

screen = Console()
OBJECTIVE = "val_loss_full"
RANGE = re.compile(r"(log|uniform|int)\((.+),(.+)\)")
Row = dict[str, Any]
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
    rows.sort(key=lambda row: row[OBJECTIVE] if row[OBJECTIVE] is not None else float("inf"))
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    varied = [key for key, values in choices.items() if len(values) > 1 or RANGE.match(values[0])]
    show(rows, varied)
    plot(rows, varied, folder / "sweep.png")
    return rows


def read_choices(assignments: Sequence[str]) -> Choices:
    """model.width=32,64 -> {"model.width": ["32", "64"]}; a range such as log(1,2) is one value."""
    choices = {}
    for assignment in assignments:
        key, equals, values = assignment.lstrip("-").partition("=")
        if not equals or not values:
            raise ValueError(f"{assignment!r}: write field=value,value,... or field=log(low,high)")
        choices[key] = [values] if RANGE.fullmatch(values) else split_values(values)
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
        result = json.loads((folder / "result.json").read_text())
        return {**chosen, **result, "run": folder.name}
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
    """Optuna proposes the values, and keeps its trials in an SQLite file or at the given URL."""
    optuna = need("optuna", "--trials", "sweep")
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name=name,
        storage=storage or f"sqlite:///{folder / 'sweep.db'}",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=cfg.seed),
    )
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        # A process died during this trial. Its folder shows whether there is work to resume.
        if (folder / folder_name(trial.params)).exists() and storage is None:
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            study.enqueue_trial(trial.params, skip_if_exists=False)

    def objective(trial: Any) -> float:
        chosen = {key: propose(trial, key, values) for key, values in choices.items()}
        row = run_one(cfg, chosen, folder / folder_name(trial.params))
        trial.set_user_attr("row", row)
        if interrupt.received:
            study.stop()
        if row[OBJECTIVE] is None:
            raise optuna.TrialPruned(row["error"])
        return float(row[OBJECTIVE])

    ended = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    left = max(0, trials - len(study.get_trials(states=ended)))
    with Interrupt().watching() as interrupt:
        study.optimize(objective, n_trials=left)
    finished = study.get_trials(states=ended)
    if len(finished) < trials:
        interrupt.heed()
    return [trial.user_attrs["row"] for trial in finished]


def folder_name(parameters: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(parameters.items())) or "run"


def propose(trial: Any, key: str, values: list[str]) -> Any:
    if not (match := RANGE.fullmatch(values[0])):
        return trial.suggest_categorical(key, values) if len(values) > 1 else values[0]
    kind, low, high = match[1], parse(match[2].strip()), parse(match[3].strip())
    if kind == "int":
        return trial.suggest_int(key, low, high)
    return trial.suggest_float(key, low, high, log=kind == "log")


def show(rows: list[Row], varied: list[str]) -> None:
    table = Table("run", *varied, "validation loss", "parameters")
    for row in rows:
        last = ["not finite", ""]
        if row[OBJECTIVE] is not None:
            last = [f"{row[OBJECTIVE]:.4f}", f"{row['parameters']['total']:,}"]
        table.add_row(row["run"], *(str(row[key]) for key in varied), *last)
    screen.print(table)


def plot(rows: list[Row], varied: list[str], path: Path) -> None:
    """Loss against each field that was varied, if matplotlib is installed."""
    rows = [row for row in rows if row[OBJECTIVE] is not None]
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
            values if is_numeric else list(map(str, values)), [r[OBJECTIVE] for r in rows], "o"
        )
        if is_numeric and min(values) > 0 and max(values) / min(values) > 20:
            axis.set_xscale("log")
        axis.set(xlabel=key, ylabel="validation loss (nats)")
        axis.grid(alpha=0.3)
    save(figure, path, ["png"])
