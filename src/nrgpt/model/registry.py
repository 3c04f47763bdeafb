"""The names of energies, so that a configuration can be checked without loading any of them."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

ENERGIES: dict[str, Callable[[Any], Any]] = {}
"""Energies by name, each a class or a function of a ModelConfig. nrgpt.model.energy fills it."""
BUILT_IN = ("attention", "ff1", "ff2w", "ff2", "memory")


def known_energies() -> list[str]:
    return [*BUILT_IN, *(name for name in ENERGIES if name not in BUILT_IN)]


PLUGINS: list[str] = []
"""Modules that were loaded to register energies; runs remember their names."""


def load_plugin(module: str) -> None:
    """Import a module that registers energies of your own, from the current folder too."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise
        raise ValueError(
            f"plugin {module!r}: there is no such module, neither installed nor in {here}"
        ) from error
    if module not in PLUGINS:
        PLUGINS.append(module)
