"""The names of energies, so that a configuration can be checked without loading any of them."""

from collections.abc import Callable
from typing import Any

ENERGIES: dict[str, Callable[[Any], Any]] = {}
"""Energies by name, each a class or a function of a ModelConfig. nrgpt.model.energy fills it."""
BUILT_IN = ("attention", "ff1", "ff2w", "ff2", "memory")


def known_energies() -> list[str]:
    return [*BUILT_IN, *(name for name in ENERGIES if name not in BUILT_IN)]
