"""The precision that a run computes in."""

from contextlib import nullcontext
from typing import Any

import torch

from .config import TrainConfig


def autocast(cfg: TrainConfig, device: torch.device) -> Any:
    """A context in which the model computes as in training."""
    if cfg.precision == "fp32" or (cfg.precision == "auto" and device.type == "cpu"):
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
