"""Small runs for tests, in this process or in one of their own."""

import os
import signal
import subprocess
import sys

import torch
from safetensors.torch import load_file

from nrgpt.train import loop
from nrgpt.train.checkpoint import newest_valid
from nrgpt.train.config import TrainConfig
from nrgpt.train.metrics import read_metrics
from nrgpt.train.overrides import override
from nrgpt.train.presets import PRESETS

from .processes import finished, wait_for


def debug(*overrides: str) -> TrainConfig:
    return override(PRESETS["debug"](), overrides)


def final_weights(run):
    newest, _ = newest_valid(run / "checkpoints")
    assert newest is not None
    # load_file maps the file into memory: copies outlive what tests do to it.
    return {name: w.clone() for name, w in load_file(newest / "model.safetensors").items()}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "nrgpt", *arguments]


def run_cli(*arguments: str, code: int = 0, **options) -> subprocess.CompletedProcess:
    done = finished(command(*arguments), **options)
    assert done.returncode == code, done.stderr
    return done


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def losses(run):
    """Everything that counts in metrics.jsonl but how fast it was."""
    timed = ("tokens_per_second", "mfu")
    return [{k: v for k, v in line.items() if k not in timed} for line in read_metrics(run)]


def wait_for_step(run, step, process):
    path = run / "metrics.jsonl"

    def is_there():
        return path.exists() and f'"step": {step}' in path.read_text()

    wait_for(is_there, process, f"step {step}")


def stop_at(monkeypatch, step, number=signal.SIGTERM):
    """As if a signal had arrived during this iteration."""
    original = loop.Trainer.advance

    def advance(self):
        found = original(self)
        if self.step == step:
            os.kill(os.getpid(), number)
        return found

    monkeypatch.setattr(loop.Trainer, "advance", advance)
