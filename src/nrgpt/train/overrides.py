"""Change fields of a configuration by their dotted names: ``model.width=64 optimiser.lr=1e-3``."""

import ast
import dataclasses
import typing
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
        # If the field takes words, a word is meant: model.norm=none is not None.
        changes[name] = text if text in typing.get_args(known[name]) else parse(text)
    return replace(cfg, changes)


def replace(cfg: Config, changes: dict[str, Any]) -> Config:
    """Make all changes at once, so that fields which depend on each other may change together."""
    here = {name: value for name, value in changes.items() if "." not in name}
    below: dict[str, dict[str, Any]] = {}
    for name in (name for name in changes if name not in here):
        group, _, rest = name.partition(".")
        below.setdefault(group, {})[rest] = changes[name]
    for group, inner in below.items():
        here[group] = replace(getattr(cfg, group), inner)
    return dataclasses.replace(cfg, **here)  # type: ignore[type-var]


def parse(text: str) -> Any:
    """A number, None, True, False or a tuple, as Python writes them; otherwise the text itself.
    (literal_eval reads literals only, and runs no code.)"""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text  # TypeError: {[]: 1} is a literal, but not a possible value


def known_names(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """Every field's dotted name, and its annotation."""
    names: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(type(cfg)).items():
        if dataclasses.is_dataclass(hint):
            names |= known_names(getattr(cfg, name), f"{prefix}{name}.")
        else:
            names[prefix + name] = hint
    return names
