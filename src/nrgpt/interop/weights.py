"""Weight files: only safetensors are opened, never pickles. And their alignment in memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

CACHE_LINE = 64  # bytes


def align_memory(model: nn.Module) -> None:
    """Copy weights that are not aligned in a memory-mapped file. With some kernels, the last bit of
    a product depends on the address of the matrix."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % CACHE_LINE:
            parameter.data = parameter.data.clone()


def load_safetensors(
    from_pretrained: Callable[..., Any], name: Any, *arguments: Any, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """A model and transformers' report on it. Weights that do not fit the config are an error:
    transformers would ignore some, or go on with random ones."""
    subfolder, variant = options.get("subfolder") or "", options.get("variant")
    check_folder(name, subfolder, variant, options.get("revision"))
    options |= {"use_safetensors": True, "output_loading_info": True}
    model, report = from_pretrained(name, *arguments, **options)
    faults = [
        f"{kind}: {', '.join(sorted(map(str, keys)))}"
        for kind in ("missing", "unexpected", "mismatched")
        if (keys := report[f"{kind}_keys"])
    ]
    if faults:
        said = "; ".join(faults)
        raise ValueError(f"the weights in {name} do not fit their config.json; {said}")
    return model, report


def check_folder(
    name: Any, subfolder: str = "", variant: str | None = None, revision: str | None = None
) -> None:
    """Raise an error unless a folder, or a model on the Hub, has its weights as safetensors.

    transformers can be told to take safetensors only. But it opens whatever an index names, so
    an index may name nothing else.
    """
    folder = Path(str(name)) / subfolder
    ending = "" if variant is None else f".{variant}"
    weights, index = f"model{ending}.safetensors", f"model.safetensors.index{ending}.json"
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download

        try:
            path = hf_hub_download(str(name), index, subfolder=subfolder or None, revision=revision)
        except (OSError, ValueError):  # a single file has no index; other errors are transformers'
            return
        check_index(Path(path))
    elif (folder / weights).is_file() or (folder / "adapter_config.json").is_file():
        return
    elif (folder / index).is_file():
        check_index(folder / index)
    else:
        kinds = (".bin", ".pt", ".pth", ".ckpt")
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in kinds)
        if not pickles:
            raise FileNotFoundError(f"{folder} has no {weights}")
        raise ValueError(
            f"{folder} has {', '.join(pickles)} and no {weights}: pickle files can run any code "
            "and are never opened; save the weights as safetensors where they were made"
        )


def check_index(path: Path) -> None:
    try:
        files = set(json.loads(path.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of weights ({error!r})") from error
    for file in sorted(map(str, files)):
        if not file.endswith(".safetensors") or Path(file).name != file:
            raise ValueError(
                f"{path} names {file!r}: only safetensors in the same folder are opened, never "
                "pickle files"
            )
