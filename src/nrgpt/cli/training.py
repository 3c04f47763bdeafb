"""nrgpt train, presets, sweep."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ..check import suggestion
from ..model.registry import PLUGINS
from ..train.config import TrainConfig
from ..train.distributed import device_named
from ..train.estimate import duration, estimated_seconds
from ..train.faults import EXIT_CODES
from ..train.loop import train as train_run
from ..train.overrides import override
from ..train.own import fitted, prepare_own
from ..train.presets import PRESETS
from ..train.sources import model_of, read_file
from ..train.sweep import run_sweep
from .common import FREE_FORM, Overrides, app, screen
from .result import result_table

EXIT_TEXT = "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())
LONG = 3_600
"""Seconds of training on a CPU that are worth a warning."""
NEWER = ("init_from", "final_evaluation", "early_exits", "first_exit")
NEWER_OF_MODEL = (
    "terms", "safeguard", "margin", "write", "past", "prelude", "prelude_loops", "prelude_block",
    "start", "drive",
)  # fmt: skip
Preset = Annotated[str, Argument(metavar="PRESET", help="See `nrgpt presets`.")]


def preset(name: str) -> TrainConfig:
    if not isinstance(name, str) or name not in PRESETS:  # a file may hold anything
        raise ValueError(f"there is no preset {name!r}{suggestion(str(name), PRESETS)}")
    cfg = PRESETS[name]()
    return dataclasses.replace(cfg, plugins=tuple(PLUGINS)) if PLUGINS else cfg


def default_run(name: str, cfg: TrainConfig, usual: TrainConfig) -> Path:
    """runs/NAME for an unchanged preset, otherwise with a suffix that depends on the changes."""
    if cfg == usual:
        return Path("runs") / name
    fields = dataclasses.asdict(cfg)
    # Fields that came later count only if they are used: folders keep their names.
    if not cfg.plugins:
        del fields["plugins"]
    for part, group, newer in ((cfg, fields, NEWER), (cfg.model, fields["model"], NEWER_OF_MODEL)):
        for field in newer:
            if getattr(part, field) == getattr(type(part), field):
                del group[field]
    text = json.dumps(fields, sort_keys=True)
    return Path("runs") / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@app.command(context_settings=FREE_FORM, epilog=f"Exit codes: {EXIT_TEXT}.")
def train(
    name: Annotated[
        str | None,
        Argument(metavar="PRESET|CONFIG", help="See `nrgpt presets`; or a .json or .toml file."),
    ] = None,
    overrides: Overrides = None,
    text: Annotated[
        list[Path] | None,
        Option(help="Train on this file (.txt, .jsonl, ...); PRESET may be left out. Repeatable."),
    ] = None,
    tokenizer: Annotated[
        str, Option(help="--text: characters, bpe, gpt2, or auto, by the text's size.")
    ] = "auto",
    vocabulary: Annotated[int | None, Option(help="--text: tokens of --tokenizer bpe.")] = None,
    to: Annotated[Path | None, Option(help="Run folder; default in runs/.")] = None,
    packed: Annotated[
        bool, Option(help="Many runs in one process: give fields several values.")
    ] = False,
) -> None:
    """Train a preset, or on a text of your own. If it was stopped, the same command continues.

    On your own text: nrgpt train --text my.txt

    On several GPUs: torchrun --nproc-per-node 8 -m nrgpt train PRESET

    Several seeds and learning rates together: nrgpt train PRESET --packed seeds=8 lr=1e-3,2e-3
    """
    if name is not None and "=" in name:  # no preset, but already a field
        overrides, name = [name, *(overrides or [])], None
    if text and packed:
        raise ValueError(
            "--packed: not with --text; prepare the text with `nrgpt data text`, and name the "
            "dataset with data.folder=FOLDER"
        )
    if text:
        dataset = prepare_own(text, tokenizer=tokenizer, vocabulary=vocabulary)
        name = name or usual_preset()
        cfg = fitted(preset(name), dataset, overrides or [])
        folder = to or default_run(dataset.folder.name, cfg, fitted(preset(name), dataset, []))
        screen.print(f"preset {name}, data in {dataset.folder}, run in {folder}", soft_wrap=True)
        finish(cfg, folder)
        return
    if name is None:
        raise ValueError("name a preset (see `nrgpt presets`), or a file with --text FILE")
    if packed:
        several = [packed_field(assignment) for assignment in overrides or []]
        sweep(name, several, to or Path("runs") / f"{name}-packed", packed=1_000)
        return
    cfg, usual, title = configuration(name, overrides or [])
    finish(cfg, to or default_run(title, cfg, usual))


def finish(cfg: TrainConfig, folder: Path) -> None:
    if not folder.exists():
        warn_of_hours(cfg)
    result = train_run(cfg, folder)
    if os.environ.get("RANK", "0") == "0":  # only one of several processes prints
        screen.print(result_table(cfg, result))
        screen.print(f"everything is in {folder}", soft_wrap=True)


def warn_of_hours(cfg: TrainConfig) -> None:
    """Before a long training on a CPU begins."""
    is_first = os.environ.get("RANK", "0") == "0"
    if not is_first or cfg.iterations < 1_000 or device_named(cfg.device) != "cpu":
        return
    seconds = estimated_seconds(cfg)
    if seconds > LONG:
        screen.print(
            f"this will take about {duration(seconds)} on this machine's CPU; Ctrl-C saves and "
            "ends it. Made for CPUs: demo, shakespeare_cpu",
            style="yellow", soft_wrap=True, highlight=False,
        )  # fmt: skip


def usual_preset() -> str:
    """For a text of one's own, by what this machine has."""
    return "shakespeare_cpu" if device_named("auto") == "cpu" else "shakespeare_nrgpt_ff2w"


def configuration(name: str, overrides: list[str]) -> tuple[TrainConfig, TrainConfig, str]:
    """The configuration of a preset or file with changes, the one without, and a name for it."""
    title, usual = name, None
    if name.endswith((".json", ".toml")):
        path = Path(name)
        usual = read_file(path, preset)
        title = path.parent.name if path.name == "config.json" else path.stem
    base = preset(name) if usual is None else usual
    for name_of_field, _, source in (field.lstrip("-").partition("=") for field in overrides):
        if name_of_field == "init_from":  # fine-tuning keeps the model, unless told otherwise
            base = dataclasses.replace(base, model=model_of(source))
    return override(base, overrides), preset(name) if usual is None else usual, title


def packed_field(assignment: str) -> str:
    """Expand seeds=3 to seed=0,1,2 and lr to optimiser.lr."""
    key, _, value = assignment.lstrip("-").partition("=")
    if key == "seeds":
        if not value.isdecimal() or len(value) > 4 or int(value) < 1:
            raise ValueError(f"seeds={value}: must be a whole number, at least 1, below 10,000")
        return "seed=" + ",".join(map(str, range(int(value))))
    return f"optimiser.lr={value}" if key == "lr" else assignment


@app.command(context_settings=FREE_FORM)
def sweep(
    name: Preset,
    overrides: Overrides = None,
    to: Annotated[Path | None, Option(help="Folder; default sweeps/PRESET.")] = None,
    grid: Annotated[str | None, Option(help="One of the paper's named grids.")] = None,
    trials: Annotated[int | None, Option(min=1, help="Search with Optuna instead.")] = None,
    storage: Annotated[str | None, Option(help="Optuna storage URL.")] = None,
    packed: Annotated[
        int | None, Option(min=1, help="Train this many runs of one shape at a time, together.")
    ] = None,
) -> None:
    """Train a preset many times: all combinations of comma-separated values, or a search.

    nrgpt sweep shakespeare_nrgpt_ff2w model.width=64,128 seed=0,1,2

    nrgpt sweep debug optimiser.lr=log(1e-4,1e-2) --trials 20

    nrgpt sweep listops_nrgpt_ff2w --grid listops_widths seed=0,1,2 --packed 16
    """
    options: dict[str, Any] = {"grid": grid, "trials": trials, "storage": storage, "packed": packed}
    run_sweep(name, preset(name), overrides or [], to or Path("sweeps") / name, **options)
