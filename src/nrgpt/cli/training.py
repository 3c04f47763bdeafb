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
from ..train.faults import EXIT_CODES
from ..train.loop import train as train_run
from ..train.overrides import override
from ..train.presets import PRESETS
from ..train.sweep import run_sweep
from .common import FREE_FORM, Overrides, app, screen

EXIT_TEXT = "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())
Preset = Annotated[str, Argument(metavar="PRESET", help="See `nrgpt presets`.")]


def preset(name: str) -> TrainConfig:
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}{suggestion(name, PRESETS)}")
    cfg = PRESETS[name]()
    return dataclasses.replace(cfg, plugins=tuple(PLUGINS)) if PLUGINS else cfg


def default_run(name: str, cfg: TrainConfig) -> Path:
    """runs/NAME for an unchanged preset, otherwise with a suffix that depends on the changes."""
    if cfg == preset(name):
        return Path("runs") / name
    fields = dataclasses.asdict(cfg)
    # Fields that came later count only if they are used: folders keep their names.
    if not cfg.plugins:
        del fields["plugins"]
    for newer in ("terms", "safeguard"):
        if getattr(cfg.model, newer) == getattr(type(cfg.model), newer):
            del fields["model"][newer]
    text = json.dumps(fields, sort_keys=True)
    return Path("runs") / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@app.command(context_settings=FREE_FORM, epilog=f"Exit codes: {EXIT_TEXT}.")
def train(
    name: Preset,
    overrides: Overrides = None,
    to: Annotated[Path | None, Option(help="Run folder; default in runs/.")] = None,
    packed: Annotated[
        bool, Option(help="Many runs in one process: give fields several values.")
    ] = False,
) -> None:
    """Train a preset. If it was stopped, the same command continues.

    On several GPUs: torchrun --nproc-per-node 8 -m nrgpt train PRESET

    Several seeds and learning rates together: nrgpt train PRESET --packed seeds=8 lr=1e-3,2e-3
    """
    if packed:
        several = [packed_field(assignment) for assignment in overrides or []]
        sweep(name, several, to or Path("runs") / f"{name}-packed", packed=1_000)
        return
    cfg = override(preset(name), overrides or [])
    folder = to or default_run(name, cfg)
    result = train_run(cfg, folder)
    if os.environ.get("RANK", "0") == "0":  # only one of several processes prints
        screen.print_json(data=result)
        screen.print(f"everything is in {folder}")


def packed_field(assignment: str) -> str:
    """Expand seeds=3 to seed=0,1,2 and lr to optimiser.lr."""
    key, _, value = assignment.lstrip("-").partition("=")
    if key == "seeds":
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"seeds={value}: must be a whole number, at least 1")
        return "seed=" + ",".join(map(str, range(int(value))))
    return f"optimiser.lr={value}" if key == "lr" else assignment


@app.command()
def presets() -> None:
    """List the presets, one line each: width D, heads H, steps T, and what they are.

    PRESET is our recipe, PRESET_paper the paper's text, PRESET_released its authors' code.
    """
    for name, make in sorted(PRESETS.items()):
        cfg = make()
        model = f"{cfg.model.block} D{cfg.model.width} H{cfg.model.heads} T{cfg.model.steps}"
        what = (make.__doc__ or "").splitlines()[0]
        print(f"{name:<41} {model:<28} {cfg.iterations:>7,} iterations  {what}")


@app.command(context_settings=FREE_FORM)
def sweep(
    name: Preset,
    overrides: Overrides = None,
    to: Annotated[Path | None, Option(help="Folder; default sweeps/PRESET.")] = None,
    grid: Annotated[str | None, Option(help="One of the paper's named grids.")] = None,
    trials: Annotated[int | None, Option(help="Search with Optuna instead.")] = None,
    storage: Annotated[str | None, Option(help="Optuna storage URL.")] = None,
    packed: Annotated[
        int | None, Option(help="Train this many runs of one shape at a time, together.")
    ] = None,
) -> None:
    """Train a preset many times: all combinations of comma-separated values, or a search.

    nrgpt sweep shakespeare_nrgpt_ff2w model.width=64,128 seed=0,1,2

    nrgpt sweep debug optimiser.lr=log(1e-4,1e-2) --trials 20

    nrgpt sweep listops_nrgpt_ff2w --grid listops_widths seed=0,1,2 --packed 16
    """
    options: dict[str, Any] = {"grid": grid, "trials": trials, "storage": storage, "packed": packed}
    run_sweep(name, preset(name), overrides or [], to or Path("sweeps") / name, **options)
