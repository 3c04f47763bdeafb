"""The command line. `nrgpt --help` lists the commands in the order of these imports."""

from . import training, models, dynamics, evaluation, hub, reproduce, data  # isort: skip
from .common import app

__all__ = [
    "app", "data", "dynamics", "evaluation", "hub", "main", "models", "reproduce", "training",
]  # fmt: skip


def main() -> None:
    app()
