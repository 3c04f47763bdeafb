"""The command line. `nrgpt --help` lists the commands in the order of these imports."""

# ruff: noqa: F401
import sys
from typing import Any

from . import training, models, dynamics, evaluation, hub, reproduce, data  # isort: skip
from .common import Lasting, app

__all__ = ["app", "main"]


def main() -> None:
    streams: Any = Lasting(sys.stdout), Lasting(sys.stderr)
    sys.stdout, sys.stderr = streams
    app()
