"""A search with Optuna over the fields of a configuration.

What is proposed is a function of the seed and of the trials that have ended. So a search that was
stopped, even in the middle of a trial, proposes the same again and goes on as if it had not been.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..check import check
from ..extras import need
from ..files import InUse, locked
from .faults import Interrupt, TrainingError
from .overrides import parse

Row = dict[str, Any]
DATABASE = "sweep.db"
RANGE = re.compile(r"(log|uniform|int)\((.+),(.+)\)")


def read_range(key: str, text: str) -> tuple[str, Any, Any]:
    """log(1e-4,1e-2) -> ("log", 1e-4, 1e-2)."""
    match = RANGE.fullmatch(text)
    assert match is not None
    kind, *ends = match.groups()
    low, high = (parse(end.strip()) for end in ends)
    types = (int,) if kind == "int" else (int, float)
    are_numbers = all(type(end) in types and abs(end) < float("inf") for end in (low, high))
    wanted = f"{kind}(low,high) with two {'whole ' if kind == 'int' else ''}numbers, low below high"
    fits = are_numbers and low <= high and (low > 0 or kind != "log")
    check(fits, key, text, wanted + (", both positive" if kind == "log" else ""))
    return kind, low, high


def search(
    name: str,
    choices: dict[str, list[str]],
    carry_out: Callable[[Row], tuple[Row, float | None]],
    folder: Path,
    *,
    seed: int,
    trials: int,
    storage: str | None,
) -> list[Row]:
    """Let Optuna propose values until so many trials have ended, those of earlier calls included.
    ``carry_out`` returns a row and the loss, or None if there is none. The trials are kept in an
    SQLite file, or at the URL ``storage``, where several processes may search together."""
    if storage is not None:
        study = open_study(name, storage)
        folder.mkdir(parents=True, exist_ok=True)
        return trials_of(study, choices, carry_out, seed, trials, shared=True)
    folder.mkdir(parents=True, exist_ok=True)
    had_lock = (folder / "lock").exists()
    try:
        with locked(folder / "lock", keep=True):
            try:
                study = open_study(name, url_of(folder / DATABASE))
            except ValueError:
                if not had_lock:
                    (folder / "lock").unlink()
                raise
            rows = trials_of(study, choices, carry_out, seed, trials, shared=False)
            nothing_was_possible = all(row.get("impossible") for row in rows)
            if nothing_was_possible:  # a corrected command must not find these trials done
                (folder / DATABASE).unlink()
    except InUse as error:
        said = f"{folder} is in use by process {error.holder}; wait for it, or use --storage URL"
        raise TrainingError(said, code=5) from None
    if nothing_was_possible:
        (folder / "lock").unlink(missing_ok=True)
        with suppress(OSError):  # it holds something else
            folder.rmdir()
    return rows


def trials_of(
    study: Any,
    choices: dict[str, list[str]],
    carry_out: Callable[[Row], tuple[Row, float | None]],
    seed: int,
    trials: int,
    shared: bool,
) -> list[Row]:
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    ended = (TrialState.COMPLETE, TrialState.PRUNED)
    if not shared:  # nobody else is at work: a process died during these, and they come again
        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)
    with Interrupt().watching() as interrupt:
        while (done := len(study.get_trials(states=ended))) < trials and not interrupt.received:
            # Processes that search together must not all propose the same.
            number = len(study.get_trials()) if shared else done
            own = np.random.SeedSequence([seed, number]).generate_state(1)[0]
            study.sampler = TPESampler(seed=int(own))
            trial = study.ask()
            try:
                row, loss = carry_out({k: propose(trial, k, v) for k, v in choices.items()})
            except BaseException:
                study.tell(trial, state=TrialState.FAIL)
                raise
            trial.set_user_attr("row", row)
            if loss is None:
                study.tell(trial, state=TrialState.PRUNED)
            else:
                study.tell(trial, loss)
    finished = study.get_trials(states=ended)
    if len(finished) < trials:
        interrupt.heed()
    return [trial.user_attrs["row"] for trial in finished]


def propose(trial: Any, key: str, values: list[str]) -> Any:
    if not RANGE.fullmatch(values[0]):
        return trial.suggest_categorical(key, values) if len(values) > 1 else values[0]
    kind, low, high = read_range(key, values[0])
    if kind == "int":
        return trial.suggest_int(key, low, high)
    return trial.suggest_float(key, low, high, log=kind == "log")


def open_study(name: str, url: str) -> Any:
    optuna = need("optuna", "--trials", "sweep")
    database_error = need("sqlalchemy.exc", "--trials", "sweep").SQLAlchemyError
    try:
        return optuna.create_study(study_name=name, storage=url, load_if_exists=True)
    except (database_error, optuna.exceptions.OptunaError) as error:
        said = str(error).splitlines()[0]
        raise ValueError(
            f"{url or repr(url)} cannot be used as a record of trials ({said}); move it away to "
            "begin anew, or choose another --storage"
        ) from error


def url_of(path: Path) -> str:
    URL = need("sqlalchemy.engine", "--trials", "sweep").URL
    return str(URL.create("sqlite", database=str(path)).render_as_string(hide_password=False))
