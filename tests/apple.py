"""A stand-in for an Apple GPU, for machines without one: tensors that say they are on "mps", and
compute on the CPU.

Like such a GPU, it refuses float64, and operations of its tensors with those of the CPU; and it
notes which of PyTorch's operations were needed, to be looked up in PyTorch's own list.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

LIST = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
ANYWHERE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
OUT = ("cpu", "numpy", "tolist", "item", "__array__", "__bool__", "__int__", "__float__")
LOOKS = (
    "__get__", "__set__", "__repr__", "__index__", "backward", "detach", "clone", "copy_",
    "_has_compatible_shallow_copy_type",
)  # fmt: skip


GRADIENT: Any = Tensor.grad


class Apple(Tensor):
    """A tensor on the stand-in."""

    device = property(lambda self: torch.device("mps"))
    grad = property(
        lambda self: on_apple(GRADIENT.__get__(self)),
        lambda self, value: GRADIENT.__set__(self, value),
    )
    is_computing_gradients = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "backward":
            Apple.is_computing_gradients = True
        try:
            if name not in (*LOOKS, *OUT) and not Apple.is_computing_gradients:
                check_places(func, args, kwargs)
            found = super().__torch_function__(func, types, args, kwargs)
        finally:
            if name == "backward":
                Apple.is_computing_gradients = False
        if name in OUT:
            return tree_map(on_cpu, found)
        with DisableTorchFunction():
            for part in tree_flatten(found)[0]:
                if isinstance(part, Tensor) and part.dtype in (torch.float64, torch.complex128):
                    raise TypeError(f"{name}: an Apple GPU has no {part.dtype}")
        return found


def on_apple(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dtype in (torch.float64, torch.complex128):
        raise TypeError(f"an Apple GPU has no {value.dtype}")
    return value.as_subclass(Apple)


def on_cpu(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Apple) else value


def check_places(func: Any, args: Any, kwargs: Any) -> None:
    """Of several tensors, all must be on one device; single numbers may be anywhere."""
    with DisableTorchFunction():
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.dim()]
    if len({isinstance(x, Apple) for x in tensors}) > 1:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, mps or cpu")


def plain(value: Any) -> Any:
    """The device itself is a CPU."""
    is_device = isinstance(value, torch.device | str) and str(value)[:3] == "mps"
    return torch.device("cpu") if is_device else value


class Places(TorchFunctionMode):
    """Understands device="mps"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device | str)]
        kinds = {str(x).partition(":")[0] for x in wanted} & {"mps", "cpu"}
        if not kinds or getattr(func, "__name__", "") in ("device", "_parse_to", "__get__"):
            return func(*args, **kwargs)
        named = {name: plain(value) for name, value in kwargs.items()}
        found = func(*map(plain, args), **named)
        return tree_map(on_apple if "mps" in kinds else on_cpu, found)


class Noted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.add(func)
        return func(*args, **(kwargs or {}))


class Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> "Generator":
        return super().__new__(cls)


@contextmanager
def apple_gpu() -> Iterator[set[Any]]:
    """Within, device="mps" works. Gives the operations that were needed."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with pytest.MonkeyPatch.context() as patch, Noted() as noted, Places():
            patch.setattr(torch.backends.mps, "is_available", lambda: True)
            patch.setattr(torch, "Generator", Generator)
            yield noted.operations
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def unsupported(operations: set[Any]) -> set[str]:
    """Those that PyTorch has for a CPU, but not for an Apple GPU. (Its fused attention "for_cpu"
    has another name on each kind of device.)"""
    entries = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    listed = {entry["func"].partition("(")[0]: entry for entry in entries}

    def is_there(name: str) -> bool:
        entry = listed.get(name)
        if entry is None:  # made by PyTorch from another one, or not of its core
            return True
        if "structured_delegate" in entry:
            return is_there(entry["structured_delegate"])
        keys = [key.strip() for keys in entry.get("dispatch", {}) for key in keys.split(",")]
        return not keys or "MPS" in keys or any(key in keys for key in ANYWHERE)

    names = {str(op).removeprefix("aten.").removesuffix(".default") for op in operations}
    return {name for name in names if "_for_cpu" not in name and not is_there(name)}
