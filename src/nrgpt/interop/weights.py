"""Weight files: only safetensors are opened, never pickles. And their alignment in memory."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from .checksums import check_checksums

CONFIG, ADAPTER = "config.json", "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
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
    if config := options.get("config"):
        check_named_weights(getattr(config, "transformers_weights", None), "config")
    options |= {"use_safetensors": True, "output_loading_info": True}
    try:
        model, report = from_pretrained(name, *arguments, **options)
    except SafetensorError as error:
        raise ValueError(f"{name}: not a file of tensors ({error})") from error
    except OSError as error:  # those of transformers do not always say of what
        if error.errno is None and str(name) not in str(error):
            raise OSError(f"{name}: {error}") from error
        raise
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
    """Raise an error unless a folder, or a model on the Hub, has its weights as safetensors, and
    the files of an export are as they were written."""
    check_kind(name, subfolder, variant, revision)
    if (folder := Path(str(name)) / subfolder).is_dir():
        check_checksums(folder)


def check_kind(name: Any, subfolder: str, variant: str | None, revision: str | None) -> None:
    """Only safetensors are opened.

    transformers can be told to take safetensors only. But it opens whatever an index names, so
    an index may name nothing else.
    """
    folder = Path(str(name)) / subfolder
    if folder.is_dir():
        for file in (CONFIG, ADAPTER):
            if (folder / file).is_file():
                check_config_file(folder / file)
    ending = "" if variant is None else f".{variant}"
    weights, index = f"model{ending}.safetensors", f"model.safetensors.index{ending}.json"
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download

        checks = {CONFIG: check_config_file, ADAPTER: check_config_file, index: check_index}
        for file, check_it in checks.items():
            try:
                path = hf_hub_download(
                    str(name), file, subfolder=subfolder or None, revision=revision
                )
            except (OSError, ValueError):  # not all are there; other errors are transformers'
                continue
            check_it(Path(path))
    elif (folder / weights).is_file() or (
        (folder / ADAPTER).is_file() and (folder / "adapter_model.safetensors").is_file()
    ):
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


def check_config_file(path: Path) -> None:
    """A configuration may name the weights to open, and an adapter the model below it."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(fields, dict)
    except (ValueError, RecursionError, AssertionError) as error:
        raise ValueError(f"{path} is not a configuration ({error!r})") from error
    check_named_weights(fields.get("transformers_weights"), str(path))
    base = fields.get("base_model_name_or_path")
    if path.name == ADAPTER and isinstance(base, str) and os.path.isdir(base):
        check_folder(base)


def check_named_weights(named: Any, where: str) -> None:
    """transformers opens the file that this field names, or what the index of that name names."""
    if named not in (None, "model.safetensors"):
        raise ValueError(
            f"{where}: transformers_weights = {named!r}: must be 'model.safetensors' or left out; "
            "other files are never opened, since they may be pickle files"
        )


def check_index(path: Path) -> None:
    try:
        files = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of weights ({error!r})") from error
    for file in sorted(map(str, files)):
        if not file.endswith(".safetensors") or Path(file).name != file:
            raise ValueError(
                f"{path} names {file!r}: only safetensors in the same folder are opened, never "
                "pickle files"
            )
