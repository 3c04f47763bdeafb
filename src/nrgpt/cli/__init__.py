"""The command line. `nrgpt --help` lists the commands in the order of these imports."""

from . import training, models, dynamics, evaluation, hub, reproduce, data  # noqa: F401  # isort: skip
from .common import app

__all__ = ["app", "main"]


def main() -> None:
    app()
