"""The command line. `nrgpt --help` lists the commands in the order of these imports."""

# ruff: noqa: F401
from . import training, presets, fields, models, dynamics, evaluation, serving, hub, reproduce, data  # isort: skip
from .common import app

__all__ = ["app", "main"]


def main() -> None:
    app()
