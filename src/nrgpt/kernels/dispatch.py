"""Which version of an operation is taken, and why.

Every operation has a plain PyTorch version, which is the truth. Where there is a faster one, this
is the one place that decides. ``NRGPT_KERNELS=plain`` keeps to the plain ones; ``explain`` tells
what would be taken.
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
"""Up to this wide, the feed-forward part of a step is one kernel."""
SHORT_CONTEXT = 256
"""Up to this many tokens, attention of small heads reads and writes them where they are."""
SMALL_HEAD = 64
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


class Choice(NamedTuple):
    fused: bool
    """The Triton kernel; else plain PyTorch."""
    why: str


HAS_KERNELS = Path(__file__).with_name("triton_force.py").exists()
"""Not so in the code that is exported for Hugging Face, which goes without them."""
HAS_TRITON = HAS_KERNELS and importlib.util.find_spec("triton") is not None
_is_packed = False


@contextmanager
def packed() -> Iterator[None]:
    """Inside, models run under torch.vmap, which most kernels know nothing of."""
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
    """``batches``: the kernel knows what to do under vmap."""
    if asked_for_plain():
        return Choice(False, "NRGPT_KERNELS=plain")
    if tensor.device.type != "cuda":
        return Choice(False, f"Triton kernels are for CUDA, and this is on {tensor.device.type}")
    if _is_packed and not batches:
        return Choice(False, "packed runs are batched by vmap, which takes plain operations apart")
    if is_transformed():
        return Choice(False, "the kernels know nothing of torch.func and forward differentiation")
    if tensor.dtype not in PRECISIONS:
        return Choice(False, f"{tensor.dtype} is for checks, and the plain version is their truth")
    if not HAS_TRITON:
        return Choice(False, "Triton, or its kernels, are not installed")
    return Choice(True, "on CUDA")


def is_transformed() -> bool:
    """Inside of a transformation of torch.func (packed runs' own apart) or of forward-mode
    differentiation, which would take a kernel's derivative for zero."""
    if _is_packed or torch.compiler.is_compiling():
        return False
    is_forward = torch.autograd.forward_ad._current_level >= 0
    return is_forward or torch._C._functorch.peek_interpreter_stack() is not None


def choose_small(tensor: Tensor) -> Choice:
    """For kernels of small models in training, which know of vmap and of one precision."""
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
    """What a forward pass may use, decided once before its first step."""

    elementwise: bool = False
    """Forces in one kernel."""
    small: bool = False
    """Kernels for small models, in bfloat16."""


def kernels_for(some: Tensor) -> Kernels:
    """For a forward pass whose weights are like this one."""
    return Kernels(choose(some, batches=True).fused, choose_small(some).fused)


def is_tiled(q: Tensor, *, shared: bool) -> bool:
    """Full-rank heads on a GPU: too wide for flash kernels, and with keys in common, so that all
    heads of a tile make one large product."""
    fits = q.is_cuda and shared and q.shape[-1] > FLASH_SIZE
    return fits and not _is_packed and not asked_for_plain()


def explain(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> str:
    """What would be taken on a device, operation by operation."""
    some = torch.empty(1, 1, FLASH_SIZE + 1, device=device, dtype=dtype)
    fused, why = choose(some)
    lines = [(operation, "Triton" if fused else "plain", why) for operation in OPERATIONS]
    fused, why = choose_small(some)
    for operation in SMALL_OPERATIONS:
        lines.append((operation, "Triton" if fused else "plain", why))
    fused, why = choose(some)
    tiled = is_tiled(some, shared=True)
    if tiled:
        why = f"heads wider than {FLASH_SIZE}, beyond flash kernels, share their keys"
    lines.append(("attention of full-rank heads", "tiles" if tiled else "plain", why))
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
