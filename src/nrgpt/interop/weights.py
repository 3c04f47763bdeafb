"""Weight files: which are opened (safetensors, never pickles), and where they end up in memory."""

import json
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


def check_folder(
    name: Any, subfolder: str = "", variant: str | None = None, revision: str | None = None
) -> None:
    """A local folder must have safetensors; if pickle files lie there instead, that is said. On the
    Hub transformers is told to take safetensors alone. An index, here or there, may name nothing
    else: transformers would open whatever it names."""
    folder = Path(str(name)) / subfolder
    ending = "" if variant is None else f".{variant}"
    wanted = [f"model{ending}.safetensors", f"model.safetensors.index{ending}.json"]
    if not folder.is_dir():
        check_index(index_on_hub(str(name), wanted[1], subfolder, revision))
        return
    if (folder / wanted[0]).is_file() or (folder / "adapter_config.json").is_file():
        return
    if (folder / wanted[1]).is_file():
        check_index(folder / wanted[1])
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


def index_on_hub(name: str, file: str, subfolder: str, revision: str | None) -> Path | None:
    """The index of a model in several files; None for one in a single file, or out of reach (then
    transformers will say so)."""
    from huggingface_hub import hf_hub_download

    try:
        found = hf_hub_download(name, file, subfolder=subfolder or None, revision=revision)
    except (OSError, ValueError):
        return None
    return Path(found)


def check_index(path: Path | None) -> None:
    if path is None:
        return
    try:
        files = set(json.loads(path.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no index of weights ({error!r})") from error
    for file in sorted(map(str, files)):
        if not file.endswith(".safetensors") or Path(file).name != file:
            raise ValueError(
                f"{path} names {file!r}: only safetensors beside it are opened, never pickle files"
            )
