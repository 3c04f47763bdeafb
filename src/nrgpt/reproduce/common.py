"""What the experiments share: cases, one record for each finished run, tables and figures.

    TO/results.jsonl            a row for each run: labels, counts, losses, FLOPs, seconds, commit
    TO/records.jsonl            its config, environment, result, metrics (thinned), samples ...
    TO/wall_time.jsonl          what each call took
    runs/reproduce/NAME/CASE/   the run folder itself, with checkpoints; git ignores it

A case that has a row is done, wherever its checkpoints are. Figures and tables need the records
alone.
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
from ..files import write_atomically
from ..model.flops import flops_per_token
from ..train.config import TrainConfig
from ..train.overrides import override, replace
from ..train.report import environment, read_metrics
from .records import Record, locked, put, read, read_lines
from .tables import Row
from .training import FAILED, refuse_other_configuration, screen, train_all

KEPT = ("config.json", "environment.json", "result.json", "samples.txt", FAILED)
LINES = 50
"""Most lines of metrics.jsonl that a record keeps beside those with a validation loss."""


@dataclass(frozen=True)
class Case:
    name: str
    """Of its folders."""
    cfg: TrainConfig
    labels: Mapping[str, Any]
    """What figures and tables group it by; they stand in its row."""

    def changed(self, assignments: Sequence[str]) -> "Case":
        return dataclasses.replace(self, cfg=override(self.cfg, assignments))

    def with_seeds(self, number: int) -> "list[Case]":
        return [
            Case(f"{self.name}-s{seed}", replace(self.cfg, {"seed": seed}), self.labels)
            for seed in range(number)
        ]


def suffix_of(recipe: str) -> str:
    """Of the presets of a recipe."""
    check_choice("recipe", recipe, ["ours", "paper"])
    return "_paper" if recipe == "paper" else ""


Measure = Callable[[Case, Path, Record], Row]
"""(case, run folder, record) -> further fields of its row. It may add small files to the record,
for figures that need more than numbers."""


def nothing_more(case: Case, run: Path, record: Record) -> Row:
    return {}


def carry_out(
    cases: Sequence[Case],
    to: Path,
    measure: Measure = nothing_more,
    *,
    processes: int = 1,
    plots_only: bool = False,
    forget: bool = False,
) -> list[Row]:
    """Train and record what has no record yet; returns all rows there are, earlier ones too.
    ``forget`` deletes the checkpoints of what is on record: hundreds of runs may fill a disk."""
    rows = read_rows(to)
    if plots_only:
        if not rows:
            raise ValueError(f"{to} has no results.jsonl to draw from; leave out --plots-only")
        return rows
    to.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=to).close()  # better now than after hours of training
    known, with_row = read(to), {row["case"] for row in rows}
    missing = {}
    for case in cases:
        if case.name in known and case.name in with_row:
            refuse_other_configuration(case.cfg, known[case.name], f"{case.name} in {to}")
        else:  # a row whose record was removed is to be made again
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
    """With the checkpoints, as long as they are there."""
    return Path("runs") / "reproduce" / to.name / case


def read_rows(to: Path) -> list[Row]:
    return list(read_lines(to / "results.jsonl").values())


def put_rows(to: Path, rows: Iterable[Row]) -> list[Row]:
    """Write these rows into the file, in place of those of the same cases; returns all. Other
    processes may do so at the same time: the folder is locked meanwhile."""
    with locked(to):
        found = {row["case"]: row for row in [*read_rows(to), *rows]}
        text = "".join(json.dumps(row) + "\n" for row in found.values())
        write_atomically(to / "results.jsonl", text)
    return list(found.values())


def keep_record(case: Case, run: Path, to: Path, measure: Measure, packed: int) -> Row:
    """The row, still to be written; its record is."""
    record, timed = Record.of(run, KEPT), with_seconds(read_metrics(run), case.cfg)
    text = "".join(json.dumps(entry) + "\n" for entry in thinned(timed))
    record.files["metrics.jsonl"] = text.encode()
    row = {"case": case.name, **case.labels, **facts(case.cfg, record, timed), "packed": packed}
    if "error" not in row:
        row |= measure(case, run, record)
    put(to, {case.name: record})
    return row


DISTURBED = 1.5
"""An interval that took so many times the usual one held more than training."""


def usual_speed(entries: Sequence[Row]) -> float:
    """Tokens per second that a quarter of the lines surpass."""
    speeds = [entry["tokens_per_second"] for entry in entries if "tokens_per_second" in entry]
    return float(np.quantile(speeds, 0.75)) if speeds else 0.0


def with_seconds(entries: Sequence[Row], cfg: TrainConfig) -> list[Row]:
    """Every line with the seconds of training up to it, without evaluations and checkpoints. An
    interval in which something was compiled, or another process held the machine, counts as a
    usual one."""
    usual, tokens = usual_speed(entries), cfg.log_every * cfg.batch * cfg.model.context
    seconds, timed = 0.0, []
    for entry in entries:
        if "tokens_per_second" in entry:
            speed = entry["tokens_per_second"]
            seconds += tokens / (speed if DISTURBED * speed > usual else usual)
        timed.append({**entry, "seconds": round(seconds, 3)})
    return timed


def thinned(entries: Sequence[Row]) -> list[Row]:
    plain = [entry for entry in entries if "val_loss" not in entry]
    every = -(-len(plain) // LINES) if plain else 1
    kept = {id(entry) for entry in plain[every - 1 :: every]}
    return [entry for entry in entries if "val_loss" in entry or id(entry) in kept]


def facts(cfg: TrainConfig, record: Record, timed: Sequence[Row]) -> Row:
    """What every experiment's rows hold. Estimates are means over random windows, the last one's
    and the best one's; val_loss_full is over every token of the split, at the last iteration."""
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
    estimates = [entry for entry in timed if "val_loss" in entry]
    row |= {
        "parameters": result["parameters"]["total"],
        "parameters_tied": result["parameters"]["tied"],
        "parameters_untied": result["parameters"]["untied"],
        "train_loss": estimates[-1]["train_loss"],
        "val_loss": estimates[-1]["val_loss"],
        "best_val_loss": result["best_val_loss_estimate"],
        "best_step": result["best_step"],
        "val_loss_full": result["val_loss_full"],
        "val_loss_full_least_context": result["val_loss_full_least_context"],
        "rollbacks": result["rollbacks"],
        "seconds": timed[-1]["seconds"],
    }
    if "listops" in result:
        names = ("correct", "total", "accuracy", "interval")
        row |= {name: result["listops"][name] for name in names}
    return row


def note_wall_time(to: Path, runs: int, processes: int, seconds: float) -> None:
    """The whole of a call, up to where it was stopped: training, evaluation, all around."""
    screen.print(f"{runs:,} runs took {seconds:,.0f} s of wall time, {processes} at a time")
    origin = environment()
    entry = {"runs": runs, "processes": processes, "seconds": round(seconds, 1)}
    entry |= {name: origin[name] for name in ("command", "commit", "gpu", "torch")}
    with (to / "wall_time.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
