"""Precision and compilation, PyTorch's count of FLOPs, and how fast this machine multiplies."""

import functools
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..language_model import LanguageModel
from ..model.config import ModelConfig
from .config import TrainConfig


def autocast(cfg: TrainConfig, device: torch.device) -> Any:
    """A context in which the model computes in the precision of training."""
    if cfg.precision == "fp32" or (cfg.precision == "auto" and device.type == "cpu"):
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def counted_flops_per_token(cfg: ModelConfig, batch: int = 1) -> float:
    """PyTorch's count of what ``flops_per_token`` adds up from the parts of a model: forward and
    backward pass of a batch through the whole model, divided by its tokens."""
    with torch.device("meta"):
        model = LanguageModel(cfg)
        idx = torch.zeros(batch, cfg.context, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            _, loss = model(idx, idx)
            assert loss is not None
            loss.backward()
    return counter.get_total_flops() / (batch * cfg.context)


def matrix_product_rate(device: torch.device, precision: str) -> float:
    """FLOP/s of a large matrix product, the reference for model-FLOP utilisation. The fastest of
    several counts: other processes on the machine can only slow it down."""
    is_cuda = device.type == "cuda"
    size = 8192 if is_cuda else 1024
    dtype = torch.bfloat16 if precision != "fp32" and is_cuda else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    wait = torch.cuda.synchronize if is_cuda else lambda: None
    seconds = []
    for _ in range(20 if is_cuda else 5):
        wait()
        start = time.perf_counter()
        a @ a
        wait()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


rate_of_this_machine = functools.cache(matrix_product_rate)
"""The same, measured once in a process: the runs of a sweep need not wait for it again."""


DEEP = 24
"""Models with at most this many steps are compiled as a whole."""


def compile_model(model: LanguageModel) -> None:
    """Compile in place: the whole model with all its steps unrolled or, since that takes longer the
    more steps there are, the one block of a deep model, to be used at every step."""
    forget_compiled()
    if model.cfg.steps <= DEEP or len(model.blocks) > 1:
        model.compile(dynamic=False)
    else:
        model.blocks[0].compile()


def forget_compiled() -> None:
    """Start afresh. Torch compiles only so many versions of a function, and once it has seen two
    batch sizes, it compiles for any size, which is slower."""
    torch.compiler.reset()
