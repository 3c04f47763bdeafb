"""Change fields of a configuration by their dotted names: ``model.width=64 optimiser.lr=1e-3``."""

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from ..check import suggestion

Config = TypeVar("Config")


def override(cfg: Config, assignments: Sequence[str]) -> Config:
    """A copy of ``cfg`` with each ``name=value`` applied; leading dashes are allowed."""
    known = known_names(cfg)
    changes: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.lstrip("-").partition("=")
        if not equals:
            raise ValueError(f"{assignment!r}: write name=value, for example model.width=64")
        if name not in known:
            raise ValueError(f"there is no field {name!r}{suggestion(name, known)}")
        changes[name] = parse(text)
    return replace(cfg, changes)


def replace(cfg: Config, changes: dict[str, Any]) -> Config:
    """All changes at once, so that fields which must fit together may change together."""
    here: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        group, dot, rest = name.partition(".")
        if dot:
            below.setdefault(group, {})[rest] = value
        else:
            here[name] = value
    for group, inner in below.items():
        here[group] = replace(getattr(cfg, group), inner)
    return dataclasses.replace(cfg, **here)  # type: ignore[type-var]


def parse(text: str) -> Any:
    """A number, None, True, False or a tuple as Python writes it; otherwise the text itself.
    (literal_eval reads literals alone and calls nothing.)"""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text  # TypeError: {[]: 1} is a literal, but nothing that Python could make


def known_names(cfg: Any, prefix: str = "") -> list[str]:
    """Every field's dotted name."""
    names = []
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):
            names += known_names(value, f"{prefix}{field.name}.")
        else:
            names.append(prefix + field.name)
    return names
