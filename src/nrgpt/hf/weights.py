"""Weight files: which are opened (safetensors, never pickles), and where they end up in memory."""

from pathlib import Path
from typing import Any

from torch import nn

CACHE_LINE = 64  # bytes


def align_memory(model: nn.Module) -> None:
    """Weights that lie askew in a mapped file are copied: the products of some kernels depend, in
    the last bit, on where a matrix starts."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % CACHE_LINE:
            parameter.data = parameter.data.clone()


def check_folder(name: Any, subfolder: str = "", variant: str | None = None) -> None:
    """A local folder must have safetensors; if pickle files lie there instead, that is said. (What
    is no folder is a name on the Hub, where transformers is told to take safetensors alone.)"""
    folder = Path(str(name)) / subfolder
    if not folder.is_dir():
        return
    ending = "" if variant is None else f".{variant}"
    wanted = [f"model{ending}.safetensors", f"model.safetensors.index{ending}.json"]
    if any((folder / file).is_file() for file in (*wanted, "adapter_config.json")):
        return
    pickles = sorted(
        file.name for kind in ("bin", "pt", "pth", "ckpt") for file in folder.glob(f"*.{kind}")
    )
    if pickles:
        raise ValueError(
            f"{folder} has {', '.join(pickles)} and no {wanted[0]}: pickle files can run any code "
            "and are never opened; save the weights as safetensors where they were made"
        )
    raise FileNotFoundError(f"{folder} has no {wanted[0]}")
