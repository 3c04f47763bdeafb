"""Short descriptions of objects that hold large tensors."""

import dataclasses
from typing import Any, TypeVar

from torch import Tensor

Kind = TypeVar("Kind")


def short(cls: type[Kind]) -> type[Kind]:
    """A dataclass whose repr tells tensors by their shape, or their value if there is only one.

    >>> import dataclasses, torch
    >>> from nrgpt.dynamics.short import short
    >>> @short
    ... @dataclasses.dataclass
    ... class Found:
    ...     points: torch.Tensor
    ...     energy: torch.Tensor
    >>> Found(torch.zeros(3, 2), torch.tensor(0.5))
    Found(points: 3 x 2, energy: 0.5)
    """

    def __repr__(self: Any) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        told = ", ".join(f"{name}: {brief(v)}" for name, v in values.items() if v is not None)
        return f"{cls.__name__}({told})"

    cls.__repr__ = __repr__  # type: ignore[method-assign]
    return cls


def brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.4g}" if value.dim() == 0 else " x ".join(map(str, value.shape))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {brief(v)}" for name, v in value.items()) + "}"
    if isinstance(value, int | str):
        return str(value)
    return f"{value:.4g}" if isinstance(value, float) else type(value).__name__
