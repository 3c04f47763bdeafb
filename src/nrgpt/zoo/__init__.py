"""Small trained models that come with the package, each a run folder: configuration, result,
tokenizer, and one checkpoint without its optimiser.

>>> from nrgpt import zoo
>>> from nrgpt.train.runs import load_run
>>> run = load_run(zoo.folder("listops_30_steps"))
>>> run.model.cfg.steps
30

On the command line ``zoo:NAME`` stands for such a folder: ``nrgpt sample zoo:NAME``.
"""

import json
from pathlib import Path
from typing import Any

from ..check import suggestion

FOLDER = Path(__file__).parent
PREFIX = "zoo:"


def names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def folder(name: str) -> Path:
    """The run folder of a model."""
    if name not in names():
        raise ValueError(f"the zoo has no model {name!r}{suggestion(name, names())}")
    return FOLDER / name


def about(name: str) -> dict[str, Any]:
    """What it is, in words, and how many parameters it has."""
    found: dict[str, Any] = json.loads((folder(name) / "about.json").read_text())
    return found


def is_inside(run: Path) -> bool:
    return run.resolve().parent == FOLDER.resolve()
