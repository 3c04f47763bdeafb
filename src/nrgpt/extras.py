"""Packages that only some uses need. They are imported where they are used, with ``need``; whoever
can do without one catches ``MissingExtra``."""

import importlib
from typing import Any


class MissingExtra(ImportError, ValueError):
    """A package is not installed. Also a ValueError, since the user can fix it."""


def need(module: str, what_for: str, extra: str = "eval") -> Any:
    """Import a module, or raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtra(
            f"{what_for} needs {package}, which could not be imported ({error}): "
            f"pip install 'nrgpt[{extra}]'",
            name=error.name,
        ) from error
