"""Which version of an operation is taken, and why.

Every operation has a plain PyTorch version, the reference. If there is a faster one too, this is
the only place that decides between them. ``NRGPT_KERNELS=plain`` takes the plain ones only;
``explain`` says what would be taken.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

FLASH_SIZE = 256
"""Flash kernels take heads up to this wide."""
FUSED_WIDTH = 128
"""Up to this width, the feed-forward part of a step is one kernel."""
SHORT_CONTEXT = 256
"""Up to this many tokens, one kernel does the attention of heads up to SMALL_HEAD wide."""
SMALL_HEAD = 64
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


class Choice(NamedTuple):
    fused: bool
    """The Triton kernel; else plain PyTorch."""
    why: str


HAS_KERNELS = Path(__file__).with_name("triton_force.py").exists()
"""False in the code exported for Hugging Face, which does without them."""
HAS_TRITON = HAS_KERNELS and importlib.util.find_spec("triton") is not None
_is_packed = False


@contextmanager
def packed() -> Iterator[None]:
    """Models run under torch.vmap inside, which most kernels do not support."""
    global _is_packed
    _is_packed = True
    try:
        yield
    finally:
        _is_packed = False


def is_packed() -> bool:
    return _is_packed


def asked_for_plain() -> bool:
    value = os.environ.get("NRGPT_KERNELS", "")
    if value not in ("", "plain"):
        raise ValueError(f"NRGPT_KERNELS={value!r}: must be 'plain', or not set")
    return value == "plain"


def choose(tensor: Tensor, *, batches: bool = False) -> Choice:
    """``batches``: the kernel supports vmap."""
    if asked_for_plain():
        return Choice(False, "NRGPT_KERNELS=plain")
    if tensor.device.type != "cuda":
        return Choice(False, f"Triton kernels need CUDA, and this is on {tensor.device.type}")
    if _is_packed and not batches:
        return Choice(False, "packed runs are batched by vmap, which this kernel does not support")
    if is_transformed():
        return Choice(
            False, "the kernels do not support torch.func and forward-mode differentiation"
        )
    if tensor.dtype not in PRECISIONS:
        return Choice(False, f"{tensor.dtype} is for checks, whose reference is the plain version")
    if not HAS_TRITON:
        return Choice(False, "Triton, or its kernels, are not installed")
    return Choice(True, "on CUDA")


def is_transformed() -> bool:
    """Inside a transformation of torch.func (other than that of packed runs) or of forward-mode
    differentiation, which would take a kernel's derivative to be zero."""
    if _is_packed or torch.compiler.is_compiling():
        return False
    is_forward = torch.autograd.forward_ad._current_level >= 0
    return is_forward or torch._C._functorch.peek_interpreter_stack() is not None


def choose_small(tensor: Tensor) -> Choice:
    """For the training kernels of small models, which support vmap and one precision."""
    choice = choose(tensor, batches=True)
    if not choice.fused:
        return choice
    is_mixed = torch.is_autocast_enabled("cuda")
    precision = torch.get_autocast_dtype("cuda") if is_mixed else tensor.dtype
    if precision != torch.bfloat16:
        return Choice(False, f"the kernel computes in bfloat16, and this is {precision}")
    is_hopper = torch.cuda.get_device_properties(tensor.device).major in (9, 10)
    if torch.version.hip is not None or not is_hopper:
        return Choice(False, "its blocks are for Hopper and Blackwell chips")
    return choice


class Kernels(NamedTuple):
    """What a forward pass may use: decided once, before its first step."""

    elementwise: bool = False
    """Forces in one kernel."""
    small: bool = False
    """Kernels for small models, in bfloat16."""


def kernels_for(some: Tensor) -> Kernels:
    """For a forward pass with weights like this one."""
    return Kernels(choose(some, batches=True).fused, choose_small(some).fused)


def is_tiled(q: Tensor, *, shared: bool) -> bool:
    """Full-rank heads on a GPU: they are too wide for flash kernels, but share their keys, so that
    the heads of a tile make one large product."""
    fits = q.is_cuda and shared and q.shape[-1] > FLASH_SIZE
    return fits and not _is_packed and not is_transformed() and not asked_for_plain()


def explain(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> str:
    """What would be taken on a device, operation by operation."""
    some = torch.empty(1, 1, FLASH_SIZE + 1, device=device, dtype=dtype)
    choices = dict.fromkeys(OPERATIONS, choose(some)) | dict.fromkeys(
        SMALL_OPERATIONS, choose_small(some)
    )
    lines = [(name, "Triton" if fused else "plain", why) for name, (fused, why) in choices.items()]
    taken, why = "plain", choose(some).why
    if is_tiled(some, shared=True):
        taken = "tiles"
        why = f"heads wider than {FLASH_SIZE}, beyond flash kernels, share their keys"
    lines.append(("attention of full-rank heads", taken, why))
    return "\n".join(f"{operation:<36} {taken:<7} {why}" for operation, taken, why in lines)


OPERATIONS = (
    "forces of FF1 and FF2W",
    "attention of one token to kept keys",
    "keeping one token's keys",
    "cross-entropy and its gradient",
)
SMALL_OPERATIONS = (
    f"feed-forward, D <= {FUSED_WIDTH}, bf16",
    f"attention, N <= {SHORT_CONTEXT}, size <= {SMALL_HEAD}, bf16",
)
