"""All commands. `nrgpt --help` lists them in the order of these imports."""

# ruff: noqa: F401
from . import training, presets, fields, models, explore, dynamics, evaluation, verify  # isort: skip
from . import serving, hub, reproduce, data  # isort: skip
from .common import app

__all__ = ["app"]
