"""What a training takes at least, so that the impossible is refused before anything is built."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ..language_model import LanguageModel
from ..model.config import ModelConfig
from .config import TrainConfig
from .distributed import World

GIB = 2**30


def check_memory(cfgs: Sequence[TrainConfig], where: World) -> None:
    """Refuse a model or a batch that cannot fit into the memory of this machine."""
    cfg, available = cfgs[0], memory_of(where.device)
    weights = parameters(cfg.model)
    shares = where.size if cfg.parallel == "fsdp" else 1
    # Weights, gradients and the optimiser's two averages, in float32.
    state = 16 * weights * len(cfgs) / shares
    texts = cfg.batch / (cfg.accumulation * where.size)
    kept = 1 if cfg.checkpoint_steps else cfg.model.steps
    batch = 4 * len(cfgs) * texts * cfg.model.context * (cfg.model.width * kept + 4)
    if available is None or state + batch < available:
        return
    fields = "model.width, model.vocab_size or model.context"
    smaller = fields if state > batch else "batch, or a larger accumulation"
    raise ValueError(
        f"this training takes at least {(state + batch) / GIB:,.1f} GiB of memory "
        f"({state / GIB:,.1f} for {weights:,} parameters, {batch / GIB:,.1f} for a batch), and "
        f"{where.device.type} has {available / GIB:,.1f}; choose a smaller {smaller}"
    )


def parameters(cfg: ModelConfig) -> int:
    """How many there are, without making them. Blocks of a deep model are alike: two tell all."""
    if cfg.steps <= 3:
        return count(cfg)
    two, three = (count(dataclasses.replace(cfg, steps=steps)) for steps in (2, 3))
    return two + (cfg.steps - 2) * (three - two)


def count(cfg: ModelConfig) -> int:
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in LanguageModel(cfg).parameters())
    except (RuntimeError, TypeError, OverflowError) as error:
        sizes = ("vocab_size", "context", "width", "hidden_factor")
        largest = max(sizes, key=lambda name: getattr(cfg, name))
        raise ValueError(
            f"model.{largest} = {getattr(cfg, largest)}: such a model has more numbers than can be "
            "counted; choose a smaller one"
        ) from error


def memory_of(device: torch.device) -> int | None:
    """Bytes; None if the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    try:
        return min(found, int(limit.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return found
