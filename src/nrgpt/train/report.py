"""What a run reports: metrics.jsonl, progress on the screen, a picture of its losses."""

import dataclasses
import io
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from ..dynamics.figures import new_figure
from ..extras import MissingExtra, need
from ..files import write_atomically
from .config import TrainConfig
from .metrics import Metrics, read_metrics

console = Console(stderr=True, markup=False, emoji=False)
COMMIT = "NRGPT_COMMIT"
"""Environment variable: the commit to record if git cannot tell."""


SHOWN = {"loss": "loss", "val_loss": "val"}
"""What the bar shows first, and how it calls it."""


class Report:
    """Reports to metrics.jsonl, the screen and, if asked, TensorBoard and Weights & Biases."""

    def __init__(self, run: Path, cfg: TrainConfig, step: int, quiet: bool, show: bool = True):
        """A ``quiet`` report does nothing; one that does not ``show`` leaves the screen alone."""
        self.latest: dict[str, float] = {}
        self.quiet = quiet
        self.show = show and not quiet
        tensorboard = wandb = None
        if cfg.tensorboard:
            tensorboard = need("torch.utils.tensorboard", "tensorboard = True", "tensorboard")
        if cfg.wandb:
            wandb = need("wandb", "wandb = True", "wandb")
        self.metrics = Metrics(run)
        if not quiet:
            self.metrics.go_back(step)
        self.is_watched = console.is_terminal
        self.progress = Progress(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            # Where it is narrow, the last numbers give way.
            TextColumn(
                "{task.fields[status]}", markup=False, table_column=Column(no_wrap=True, ratio=1)
            ),
            console=console,
            expand=True,
            disable=not self.show or not self.is_watched,
        )
        self.task = self.progress.add_task("training", total=cfg.iterations, status="")
        self.progress.update(self.task, completed=step)
        self.progress.start()
        self.tensorboard = self.wandb = None
        if tensorboard is not None and not quiet:
            self.tensorboard = tensorboard.SummaryWriter(run / "tensorboard")
        if wandb is not None and not quiet:
            options = {"name": run.name, "dir": run, "config": dataclasses.asdict(cfg)}
            self.wandb = wandb.init(project="nrgpt", **options)

    def advance(self, step: int) -> None:
        """An update has been made."""
        self.progress.update(self.task, completed=step)

    def log(self, step: int, **values: float) -> None:
        if self.quiet:
            return
        self.metrics.add({"step": step, **values})
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


def environment() -> dict[str, Any]:
    """Where a result came from."""
    package = Path(__file__).parent
    git = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = os.environ.get(COMMIT)
    if not commit:
        with suppress(OSError, subprocess.TimeoutExpired):  # there may be no git
            asked = subprocess.run(git, capture_output=True, text=True, check=False, timeout=10)
            commit = asked.stdout.strip()
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
    except MissingExtra:
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
    axis.set(xlabel="iteration", ylabel="loss (nats)")
    axis.set_title(run.name, parse_math=False)  # a $ in it begins no formula
    axis.grid(alpha=0.3)
    axis.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_atomically(run / "losses.png", picture.getvalue())
