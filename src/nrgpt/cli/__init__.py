"""The command line. The order of these imports is that of `nrgpt --help`."""

# isort: off
from . import training
from . import models
from . import dynamics
from . import evaluation
from . import hub
from . import reproduce
from . import data

# isort: on
from .common import app

__all__ = [
    "app",
    "data",
    "dynamics",
    "evaluation",
    "hub",
    "main",
    "models",
    "reproduce",
    "training",
]


def main() -> None:
    app()
