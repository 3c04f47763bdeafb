"""Small trained models that come with the package. Each is a run folder with its configuration,
result and tokenizer, and one checkpoint without the optimiser's state.

>>> from nrgpt import zoo
>>> from nrgpt.train.runs import load_run
>>> run = load_run(zoo.folder("listops_30_steps"))
>>> run.model.cfg.steps
30

On the command line, ``zoo:NAME`` names such a folder: ``nrgpt sample zoo:NAME``.
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


def resolve(given: Path | str) -> Path:
    """A path as it is, or the folder of the model zoo:NAME."""
    name = str(given)
    return folder(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else Path(given)


def about(name: str) -> dict[str, Any]:
    """A description, and the number of parameters."""
    return dict(json.loads((folder(name) / "about.json").read_text(encoding="utf-8")))


def is_inside(run: Path) -> bool:
    return run.resolve().parent == FOLDER.resolve()
