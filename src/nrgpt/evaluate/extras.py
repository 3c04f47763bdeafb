"""Packages that only some evaluations need: imported where used, and missed with a way out."""

import importlib
from typing import Any


class MissingExtra(ImportError, ValueError):
    """A package that is not installed; a ValueError too, since it is the user's to mend."""


def need(module: str, what_for: str) -> Any:
    """The imported module; if it is not installed, an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtra(
            f"{what_for} needs {package}, which could not be imported ({error}): "
            "pip install 'nrgpt[eval]'"
        ) from error
