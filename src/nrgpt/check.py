"""Checks of values, and configurations that check themselves.

A wrong value or an unknown field raises a ValueError that names the field, the value and what is
allowed.
"""

import dataclasses
import difflib
import functools
import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, dataclass_transform

Config = TypeVar("Config")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def strict(cls: type[Config]) -> type[Config]:
    """A frozen, keyword-only dataclass that rejects unknown fields and values of the wrong type."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True, repr=False)(cls)
    assign = cls.__init__
    hints = typing.get_type_hints(cls)

    @functools.wraps(assign)
    def __init__(self: Config, **values: Any) -> None:
        for name in values:
            if name not in hints:
                raise ValueError(f"{cls.__name__} has no field {name!r}{suggestion(name, hints)}")
        assign(self, **{name: checked(name, v, hints[name]) for name, v in values.items()})

    def __repr__(self: Config) -> str:
        """Only what differs from the defaults."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = {
            f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default
        }
        said = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return f"{cls.__name__}({said})"

    cls.__init__ = __init__  # type: ignore[method-assign, assignment]
    cls.__repr__ = __repr__  # type: ignore[method-assign, assignment]
    return cls


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known name, or all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"


def checked(name: str, value: Any, hint: Any) -> Any:
    """Return ``value`` if it has the annotated type, else raise a ValueError. NumPy's numbers
    become Python's, and lists tuples."""
    if typing.get_origin(hint) is Literal:
        check_choice(name, value, typing.get_args(hint))
        return value
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    members = typing.get_args(hint) if is_union else (hint,)
    allowed = [typing.get_origin(member) or member for member in members]  # tuple[int] -> tuple
    if isinstance(value, numbers.Number) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, list) and tuple in allowed:
        value = tuple(value)
    # In Python True is an int and 1 is not a float. For a field, neither is meant.
    wanted = tuple(t for kind in allowed for t in ((int, float) if kind is float else (kind,)))
    is_stray_bool = isinstance(value, bool) and bool not in allowed
    if is_stray_bool or not isinstance(value, wanted):
        words = " or ".join("None" if t is types.NoneType else t.__name__ for t in allowed)
        raise ValueError(f"{name} = {value!r}: must be of type {words}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} = {value!r}: must be a finite number")
    if isinstance(value, int) and not -MOST_INT <= value <= MOST_INT:
        raise ValueError(f"{name} = {value!r}: must be below 2^63")
    if isinstance(value, tuple):
        value = checked_parts(name, value, members)
    return value


MOST_INT = 2**63 - 1
"""The largest that torch can count to."""


def checked_parts(name: str, value: tuple[Any, ...], members: Iterable[Any]) -> tuple[Any, ...]:
    """A tuple whose parts all have the type that the annotation tuple[TYPE, ...] names."""
    kinds = [typing.get_args(m)[0] for m in members if typing.get_origin(m) is tuple]
    if not kinds:
        return value
    try:
        return tuple(checked(name, part, kinds[0]) for part in value)
    except ValueError:
        kind = kinds[0].__name__
        raise ValueError(f"{name} = {value!r}: must hold nothing but {kind}") from None


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        in_small = {a.lower(): a for a in allowed}
        near = difflib.get_close_matches(str(value).lower(), in_small, n=1)
        hint = f"; did you mean {in_small[near[0]]!r}?" if near else ""
        listed = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{name} = {value!r}: must be one of {listed}{hint}")


def check(holds: bool, name: str, value: Any, must_be: str) -> None:
    if not holds:
        raise ValueError(f"{name} = {value!r}: must be {must_be}")


def from_dict(cls: type[Config], fields: Mapping[str, Any]) -> Config:
    """A configuration from JSON, with nested groups, and lists for tuples."""
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in fields.items():
        if dataclasses.is_dataclass(hints.get(name)) and isinstance(value, Mapping):
            value = from_dict(hints[name], value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)
