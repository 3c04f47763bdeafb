"""Many runs of one preset: a grid, or a search with Optuna.

Each run is an ordinary run folder, so a sweep that was stopped goes on when started again: finished
runs are read, unfinished ones go on, the rest follow.
"""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..check import check_choice
from .config import TrainConfig
from .faults import DIVERGED, Interrupt, TrainingError
from .loop import train, train_packed
from .overrides import override, parse
from .runs import check_config
from .updates import shape_of

screen = Console()
OBJECTIVE = "val_loss_full"
RANGE = re.compile(r"(log|uniform|int)\((.+),(.+)\)")


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
) -> list[dict[str, Any]]:
    """Run all there is to run; returns, prints and plots a row for each. ``packed`` runs of one
    shape are trained at a time, in one process; one by one if it is None."""
    choices = read_choices(assignments)
    if grid is not None:
        from .presets import GRIDS

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


def read_choices(assignments: Sequence[str]) -> dict[str, list[str]]:
    """model.width=32,64 -> {"model.width": ["32", "64"]}; ranges are kept in one piece."""
    choices = {}
    for assignment in assignments:
        key, equals, values = assignment.lstrip("-").partition("=")
        if not equals or not values:
            raise ValueError(f"{assignment!r}: write field=value,value,... or field=log(low,high)")
        choices[key] = [values] if RANGE.fullmatch(values) else split_values(values)
    return choices


def split_values(text: str) -> list[str]:
    """At commas that are in no parentheses: ("max","min"),("sum",) are two tuples."""
    return [value for value in re.split(r",(?![^()]*\))", text) if value]


def run_one(cfg: TrainConfig, chosen: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A row of results; a run that is already finished is only read. A run whose loss stays not
    finite is a result too, without a loss: the others go on."""
    path = folder / "result.json"
    own = override(cfg, [f"{key}={value}" for key, value in chosen.items()])
    result = json.loads(path.read_text()) if path.exists() else None
    if result is not None and result["step"] == own.iterations:
        check_config(own, folder)
        return {**chosen, **result, "run": folder.name}
    try:
        return {**chosen, **train(own, folder), "run": folder.name}
    except TrainingError as error:
        if error.code != DIVERGED:
            raise
        screen.print(f"{folder.name}: {error}", highlight=False)
        return {**chosen, OBJECTIVE: None, "error": str(error), "run": folder.name}


def run_grid(
    cfg: TrainConfig,
    choices: dict[str, list[str]],
    folder: Path,
    packed: int | None,
    skip_impossible: bool,
) -> list[dict[str, Any]]:
    for key, values in choices.items():
        if RANGE.fullmatch(values[0]):
            raise ValueError(f"{key}={values[0]}: a range needs a search; add --trials N")
    combinations = [
        dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
    ]
    # All must be possible before the first one starts. The paper's grids have combinations that
    # are not, such as width 380 with 8 heads: those are left out.
    cfgs: list[TrainConfig] = []
    possible, refused = [], []
    for chosen in combinations:
        try:
            cfgs.append(override(cfg, [f"{k}={v}" for k, v in chosen.items()]))
            possible.append(chosen)
        except ValueError as error:
            refused.append(error)
    if refused and (not skip_impossible or not possible):
        raise refused[0]
    if refused:
        count = f"{len(refused):,} of {len(combinations):,} combinations are left out"
        screen.print(f"{count}, the first because of {refused[0]}", highlight=False)
    combinations = possible
    if packed is not None:
        run_packed(cfgs, [folder / folder_name(chosen) for chosen in combinations], packed)
    rows = []
    for number, chosen in enumerate(combinations, 1):
        own = folder / folder_name(chosen)
        screen.print(f"run {number} of {len(combinations)}: {own.name}", highlight=False)
        with Interrupt().watching() as interrupt:
            rows.append(run_one(cfg, chosen, own))
        if number < len(combinations):
            interrupt.heed()
    return rows


def run_packed(cfgs: list[TrainConfig], folders: list[Path], limit: int) -> None:
    """Train what is not finished yet, runs of one shape together, at most ``limit`` at a time."""
    groups: dict[str, list[tuple[TrainConfig, Path]]] = {}
    for cfg, folder in zip(cfgs, folders, strict=True):
        path = folder / "result.json"
        if not path.exists() or json.loads(path.read_text())["step"] < cfg.iterations:
            groups.setdefault(repr(shape_of(cfg)), []).append((cfg, folder))
    for group in groups.values():
        for i in range(0, len(group), limit):
            pack = group[i : i + limit]
            screen.print(f"{len(pack)} runs together: {', '.join(f.name for _, f in pack)}")
            with Interrupt().watching() as interrupt:
                try:
                    train_packed([cfg for cfg, _ in pack], [folder for _, folder in pack])
                except TrainingError as error:  # run_one comes to the run in question again
                    if error.code != DIVERGED:
                        raise
            interrupt.heed()


def run_search(
    name: str,
    cfg: TrainConfig,
    choices: dict[str, list[str]],
    folder: Path,
    trials: int,
    storage: str | None,
) -> list[dict[str, Any]]:
    """Optuna proposes; its storage (an SQLite file, unless a URL is given) remembers."""
    try:
        import optuna
    except ImportError:
        raise ValueError("--trials needs Optuna: pip install 'nrgpt[sweep]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name=name,
        storage=storage or f"sqlite:///{folder / 'sweep.db'}",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=cfg.seed),
    )
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        # Left behind by a process that died: its folder tells whether there is work to go on with.
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
    suggest: dict[str, Callable[[], Any]] = {
        "log": lambda: trial.suggest_float(key, low, high, log=True),
        "uniform": lambda: trial.suggest_float(key, low, high),
        "int": lambda: trial.suggest_int(key, low, high),
    }
    return suggest[kind]()


def show(rows: list[dict[str, Any]], varied: list[str]) -> None:
    table = Table("run", *varied, "validation loss", "parameters")
    for row in rows:
        cells = [str(row[key]) for key in varied]
        if row[OBJECTIVE] is None:
            table.add_row(row["run"], *cells, "not finite", "")
            continue
        count = f"{row['parameters']['total']:,}"
        table.add_row(row["run"], *cells, f"{row[OBJECTIVE]:.4f}", count)
    screen.print(table)


def plot(rows: list[dict[str, Any]], varied: list[str], path: Path) -> None:
    """Loss against each field that was varied."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    rows = [row for row in rows if row[OBJECTIVE] is not None]
    if not varied or not rows:
        return
    width = 4 * len(varied)
    figure, axes = plt.subplots(1, len(varied), figsize=(width, 3.5), squeeze=False, sharey=True)
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
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
