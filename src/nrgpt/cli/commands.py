"""All commands. `nrgpt --help` lists them in the order of these imports."""

# ruff: noqa: F401
from . import training, models, explore, dynamics, evaluation, verify, hub, reproduce, data  # isort: skip
from .common import app

__all__ = ["app"]
