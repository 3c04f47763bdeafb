"""What a run reports: metrics.jsonl, progress on the screen, a picture of its losses."""

import dataclasses
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from ..dynamics.figures import new_figure, save
from ..extras import need
from ..files import write_atomically
from .config import TrainConfig

console = Console(stderr=True)
COMMIT = "NRGPT_COMMIT"
"""Environment variable: the commit to record if git cannot tell."""


SHOWN = {"loss": "loss", "val_loss": "val"}
"""What the bar shows first, and how it calls it."""


class Report:
    """Reports to metrics.jsonl, the screen and, if asked, TensorBoard and Weights & Biases."""

    def __init__(self, run: Path, cfg: TrainConfig, step: int, quiet: bool, show: bool = True):
        """A ``quiet`` report does nothing; one that does not ``show`` leaves the screen alone."""
        self.metrics = run / "metrics.jsonl"
        self.run = run
        self.latest: dict[str, float] = {}
        self.quiet = quiet
        self.show = show and not quiet
        self.drop_after(step)
        self.is_watched = console.is_terminal
        self.progress = Progress(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            # Where it is narrow, the last numbers give way.
            TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            expand=True,
            disable=not self.show or not self.is_watched,
        )
        self.task = self.progress.add_task("training", total=cfg.iterations, status="")
        self.progress.update(self.task, completed=step)
        self.progress.start()
        self.tensorboard = self.wandb = None
        if cfg.tensorboard and not quiet:
            module = need("torch.utils.tensorboard", "tensorboard = True", "tensorboard")
            self.tensorboard = module.SummaryWriter(run / "tensorboard")
        if cfg.wandb and not quiet:
            options = {"name": run.name, "dir": run, "config": dataclasses.asdict(cfg)}
            self.wandb = need("wandb", "wandb = True", "wandb").init(project="nrgpt", **options)

    def drop_after(self, step: int) -> None:
        """Drop the lines after the checkpoint that a run resumes from: they will come again."""
        if self.metrics.exists() and not self.quiet:
            entries = read_metrics(self.run)
            kept = [json.dumps(e) for e in entries if e["step"] <= step]
            write_atomically(self.metrics, "".join(line + "\n" for line in kept))

    def advance(self, step: int) -> None:
        """An update has been made."""
        self.progress.update(self.task, completed=step)

    def log(self, step: int, **values: float) -> None:
        if self.quiet:
            return
        with self.metrics.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        status = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.latest |= values
        order = sorted(self.latest, key=lambda name: ([*SHOWN, name].index(name), name))
        short = "  ".join(f"{SHOWN.get(n, n)} {self.latest[n]:.4g}" for n in order)
        self.progress.update(self.task, completed=step, status=short)
        if self.show and not console.is_terminal:
            console.print(f"iteration {step:6d}  {status}", highlight=False, soft_wrap=True)
        if self.tensorboard is not None:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(values, step=step)

    def say(self, text: str) -> None:
        if self.show:
            console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The entries of metrics.jsonl, without a last line that a crash cut short."""
    entries = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


def environment() -> dict[str, Any]:
    """Where a result came from."""
    package = Path(__file__).parent
    git = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = (
        os.environ.get(COMMIT)
        or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    )
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def plot_losses(run: Path) -> None:
    """RUN/losses.png, if matplotlib is installed."""
    try:
        figure = new_figure(7, 4)
    except ValueError:
        return
    axis = figure.subplots()
    styles: dict[str, dict[str, Any]] = {
        "loss": {"label": "batch, with dropout", "alpha": 0.4},
        "train_loss": {"label": "training data", "marker": "."},
        "val_loss": {"label": "validation data", "marker": "."},
    }
    entries = read_metrics(run)
    for name, style in styles.items():
        points = [(e["step"], e[name]) for e in entries if name in e]
        if points:
            axis.plot(*zip(*points, strict=True), **style)
    axis.set(xlabel="iteration", ylabel="loss (nats)", title=run.name)
    axis.grid(alpha=0.3)
    axis.legend()
    save(figure, run / "losses", ["png"])
