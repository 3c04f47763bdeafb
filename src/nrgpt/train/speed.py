"""What decides how fast a run is: precision, compilation, the arithmetic of a token, and how fast
this machine multiplies."""

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..language_model import LanguageModel
from ..model.config import ModelConfig
from ..model.flops import flops_per_token
from .config import TrainConfig


def autocast(cfg: TrainConfig, device: torch.device) -> Any:
    """A context in which the model computes in the precision of training."""
    if cfg.precision == "fp32" or (cfg.precision == "auto" and device.type == "cpu"):
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def training_flops_per_token(cfg: ModelConfig, batch: int) -> float:
    """Matrix-product FLOPs of training on one token of so many sequences that go through the model
    together, attention counted as if it had no mask. By formula or, for an energy of one's own, by
    PyTorch's counter on a model of shapes alone."""
    try:
        return flops_per_token(cfg, batch=batch)
    except ValueError:
        return counted_flops_per_token(cfg, batch)


def counted_flops_per_token(cfg: ModelConfig, batch: int = 1) -> float:
    """The same by PyTorch's counter."""
    with torch.device("meta"):
        model = LanguageModel(cfg)
        idx = torch.zeros(batch, cfg.context, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            _, loss = model(idx, idx)
            assert loss is not None
            loss.backward()
    return counter.get_total_flops() / (batch * cfg.context)


def matrix_product_rate(device: torch.device, precision: str) -> float:
    """FLOP/s of a large product: what model-FLOP utilisation is measured against. The fastest of
    many, since another process on the machine can only make it slower."""
    is_cuda = device.type == "cuda"
    size = 8192 if is_cuda else 1024
    dtype = torch.bfloat16 if precision != "fp32" and is_cuda else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(20 if is_cuda else 5):
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ a
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


DEEP = 24
"""Steps up to which a model is compiled as a whole."""


def compile_model(model: LanguageModel) -> None:
    """Compile in place: the whole model, all steps unrolled, or one step of a deep one, since
    compiling takes as long as there are steps."""
    forget_compiled()
    if model.cfg.steps <= DEEP or len(model.blocks) > 1:
        model.compile(dynamic=False)
        return
    model.blocks[0].compile()  # for any step: it is told which one it is


def forget_compiled() -> None:
    """What a process compiled before counts against a limit, beyond which nothing is compiled; and
    after a model of one batch, one of another would be compiled for any, which is slower."""
    torch.compiler.reset()
