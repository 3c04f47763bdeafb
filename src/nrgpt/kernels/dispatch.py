"""Which version of an operation is taken, and why.

Every operation has a plain PyTorch version, which is the truth. Where there is a faster one, this
is the one place that decides. ``NRGPT_KERNELS=plain`` keeps to the plain ones; ``explain`` tells
what would be taken.
"""

import importlib.util
import os
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


class Choice(NamedTuple):
    fused: bool
    """The Triton kernel; else plain PyTorch."""
    why: str


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def choose(tensor: Tensor, *, opaque: bool = False) -> Choice:
    """``opaque``: the kernel does what no compiler would put together, so it is taken inside
    torch.compile too."""
    if os.environ.get("NRGPT_KERNELS") == "plain":
        return Choice(False, "NRGPT_KERNELS=plain")
    if tensor.device.type != "cuda":
        return Choice(False, f"Triton kernels are for CUDA, and this is on {tensor.device.type}")
    if torch.compiler.is_compiling() and not opaque:
        return Choice(False, "torch.compile fuses it with its neighbours")
    if tensor.dtype not in PRECISIONS:
        return Choice(
            False, f"{tensor.dtype} is for checks, which the plain version is the truth of"
        )
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack():
        return Choice(False, "inside torch.func: vmap and grad take plain operations apart")
    if not has_triton():
        return Choice(False, "Triton is not installed")
    return Choice(True, "on CUDA, outside of compiled code" if not opaque else "on CUDA")


def explain(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> str:
    """What would be taken on a device, operation by operation."""
    some = torch.empty(1, device=device, dtype=dtype)
    lines = []
    for operation, opaque in OPERATIONS.items():
        fused, why = choose(some, opaque=opaque)
        lines.append(f"{operation:<36} {'Triton' if fused else 'plain':<7} {why}")
    return "\n".join(lines)


OPERATIONS = {
    "forces of FF1 and FF2W": False,
    "attention of one token to kept keys": False,
    "cross-entropy and its gradient": True,
}
