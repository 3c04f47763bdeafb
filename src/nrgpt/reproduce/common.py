"""What the experiments share: cases, and one record for each finished run.

    TO/results.jsonl            a row for each run: labels, counts, losses, FLOPs, seconds, commit
    TO/records.jsonl            its config, environment, result, metrics (thinned), samples ...
    TO/wall_time.jsonl          how long each call took
    runs/reproduce/NAME/CASE/   the run folder itself, with checkpoints; git ignores it

A case with a row and a record is done, even if its checkpoints are gone. Figures and tables are
made from rows and records alone.
"""

import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..check import check_choice
from ..model.flops import flops_per_token
from ..train.config import TrainConfig
from ..train.metrics import read_metrics
from ..train.overrides import override, replace
from ..train.report import environment
from .records import Record, change, put, read, read_lines
from .tables import Row
from .training import FAILED, refuse_other_configuration, screen, train_all

KEPT = ("config.json", "environment.json", "result.json", "samples.txt", FAILED)
LINES = 50
"""How many lines of metrics.jsonl a record keeps, besides those with a validation loss."""


@dataclass(frozen=True)
class Case:
    name: str
    """Also that of its run folder."""
    cfg: TrainConfig
    labels: Mapping[str, Any]
    """Fields of its row, for figures and tables to group by."""

    def changed(self, assignments: Sequence[str]) -> "Case":
        return dataclasses.replace(self, cfg=override(self.cfg, assignments))

    def with_seeds(self, number: int) -> "list[Case]":
        return [
            Case(f"{self.name}-s{seed}", replace(self.cfg, {"seed": seed}), self.labels)
            for seed in range(number)
        ]


def suffix_of(recipe: str) -> str:
    """What the names of a recipe's presets end with."""
    check_choice("recipe", recipe, ["ours", "paper"])
    return "_paper" if recipe == "paper" else ""


Measure = Callable[[Case, Path, Record], Row]
"""(case, run folder, record) -> further fields of its row. It may also add small files to the
record, for figures that need more than numbers."""


def carry_out(
    cases: Sequence[Case],
    to: Path,
    measure: Measure = lambda *_: {},
    *,
    processes: int = 1,
    plots_only: bool = False,
    forget: bool = False,
) -> list[Row]:
    """Train and record the cases that have no record yet; returns all rows, old and new. ``forget``
    deletes checkpoints once their run is on record, since hundreds of runs may fill a disk."""
    rows = read_rows(to)
    if plots_only:
        if not rows:
            raise ValueError(f"{to} has no results.jsonl to draw from; leave out --plots-only")
        return rows
    to.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=to).close()  # if this cannot be written to, fail before training
    known, with_row = read(to), {row["case"] for row in rows}
    missing = {}
    for case in cases:
        if case.name in known and case.name in with_row:
            refuse_other_configuration(case.cfg, known[case.name], f"{case.name} in {to}")
        else:  # also if there is a row, but its record was removed
            missing[case.name] = case
            run = run_folder(to, case.name)
            refuse_other_configuration(case.cfg, Record.of(run, KEPT), str(run))
    screen.print(f"{len(cases):,} runs, {len(cases) - len(missing):,} of them on record in {to}")
    began, recorded = time.perf_counter(), 0
    todo = [(case.cfg, run_folder(to, case.name)) for case in missing.values()]
    try:
        for pack in train_all(todo, processes):
            for _, run in pack:
                row = keep_record(missing[run.name], run, to, measure, packed=len(pack))
                put_rows(to, [row])
                recorded += 1
                if forget:
                    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    finally:
        if missing:
            note_wall_time(to, recorded, processes, time.perf_counter() - began)
    return read_rows(to)


def run_folder(to: Path, case: str) -> Path:
    return Path("runs") / "reproduce" / to.name / case


def read_rows(to: Path) -> list[Row]:
    return list(read_lines(to / "results.jsonl").values())


def put_rows(to: Path, rows: Iterable[Row]) -> list[Row]:
    """Add these rows to the file, or replace those of the same cases; returns all."""
    return change(to / "results.jsonl", {row["case"]: row for row in rows})


def keep_record(case: Case, run: Path, to: Path, measure: Measure, packed: int) -> Row:
    """Write the record of a run; returns its row, which is still to be written."""
    record, timed = Record.of(run, KEPT), with_seconds(read_metrics(run), case.cfg)
    text = "".join(json.dumps(entry) + "\n" for entry in thinned(timed))
    record.files["metrics.jsonl"] = text.encode()
    row = {"case": case.name, **case.labels, **facts(case.cfg, record, timed), "packed": packed}
    if "error" not in row:
        row |= measure(case, run, record)
    put(to, {case.name: record})
    return row


DISTURBED = 1.5
"""An interval this many times as long as usual held more than training."""


def usual_speed(entries: Sequence[Row]) -> float:
    """Tokens per second: the upper quartile over the lines."""
    speeds = [entry["tokens_per_second"] for entry in entries if "tokens_per_second" in entry]
    return float(np.quantile(speeds, 0.75)) if speeds else 0.0


def with_seconds(entries: Sequence[Row], cfg: TrainConfig) -> list[Row]:
    """Each line with the seconds of training so far, without evaluations and checkpoints. An
    interval that was disturbed, by compilation or by another process, counts like a usual one."""
    usual, tokens = usual_speed(entries), cfg.log_every * cfg.batch * cfg.model.context
    seconds, timed = 0.0, []
    for entry in entries:
        if "tokens_per_second" in entry:
            speed = entry["tokens_per_second"]
            seconds += tokens / (speed if DISTURBED * speed > usual else usual)
        timed.append({**entry, "seconds": round(seconds, 3)})
    return timed


def thinned(entries: Sequence[Row]) -> list[Row]:
    plain = [n for n, entry in enumerate(entries) if "val_loss" not in entry]
    every = max(1, -(-len(plain) // LINES))
    kept = set(plain[every - 1 :: every])
    return [entry for n, entry in enumerate(entries) if "val_loss" in entry or n in kept]


FROM_RESULT = ("best_step", "val_loss_full", "val_loss_full_least_context", "rollbacks")


def facts(cfg: TrainConfig, record: Record, timed: Sequence[Row]) -> Row:
    """The fields that rows of all experiments have. train_loss, val_loss and best_val_loss are
    estimates over random windows; val_loss_full counts every token of the split, at the end."""
    origin = record.read("environment.json")
    tokens = cfg.iterations * cfg.batch * cfg.model.context
    flops = flops_per_token(cfg.model, batch=cfg.batch // cfg.accumulation)
    row: Row = {
        "seed": cfg.seed,
        "width": cfg.model.width,
        "heads": cfg.model.heads,
        "steps": cfg.model.steps,
        "lr": cfg.optimiser.lr,
        "iterations": cfg.iterations,
        "tokens": tokens,
        "training_flops": tokens * flops,
        "commit": origin["commit"],
        "gpu": origin["gpu"],
    }
    if FAILED in record:
        return row | record.read(FAILED)
    result = record.read("result.json")
    counts, last = result["parameters"], [entry for entry in timed if "val_loss" in entry][-1]
    row |= {
        "parameters": counts["total"],
        **{f"parameters_{name}": counts[name] for name in ("tied", "untied")},
        **{name: last[name] for name in ("train_loss", "val_loss")},
        "best_val_loss": result["best_val_loss_estimate"],
        **{name: result[name] for name in FROM_RESULT},
        "seconds": timed[-1]["seconds"],
    }
    if "listops" in result:
        names = ("correct", "total", "accuracy", "interval")
        row |= {name: result["listops"][name] for name in names}
    return row


def note_wall_time(to: Path, runs: int, processes: int, seconds: float) -> None:
    """Record how long a whole call took, or how long it ran until it was stopped."""
    screen.print(f"{runs:,} runs took {seconds:,.0f} s of wall time, {processes} at a time")
    origin = environment()
    entry = {"runs": runs, "processes": processes, "seconds": round(seconds, 1)}
    entry |= {name: origin[name] for name in ("command", "commit", "gpu", "torch")}
    with (to / "wall_time.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
