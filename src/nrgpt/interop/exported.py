"""Exports (`nrgpt export`) read back into nrgpt, without transformers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from ..data.tokenizer import FastTokenizer, SymbolTokenizer, Tokenizer
from ..language_model import LanguageModel
from ..model.config import ModelConfig
from .weights import align_memory, check_folder

PREFIX = "language_model."
"""What the wrapper for transformers puts before the name of each weight."""


def is_export(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and json.loads(config.read_text()).get("model_type") == "nrgpt"


def read_export(folder: Path) -> LanguageModel:
    fields = json.loads((folder / "config.json").read_text())
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    model = LanguageModel(ModelConfig(**{k: v for k, v in fields.items() if k in known}))
    if "quantization_config" in fields:
        raise ValueError(f"{folder} is quantised: only transformers can load it")
    check_folder(folder)
    weights: dict[str, Tensor] = {}
    for name in files_of(folder):
        weights |= load_file(folder / name)
    strange = sorted(name for name in weights if not name.startswith(PREFIX))
    if strange:
        raise ValueError(f"{folder} is no export of nrgpt: it has weights {', '.join(strange)}")
    model.load_state_dict({name.removeprefix(PREFIX): value for name, value in weights.items()})
    align_memory(model)
    return model


def files_of(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))


def read_tokenizer(folder: Path) -> Tokenizer:
    """Characters and ListOps' symbols come back as what they were exported from; all others are
    read by the library ``tokenizers``."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file, and text needs a tokenizer")
    text = path.read_text(encoding="utf-8")
    return symbols_of(json.loads(text)) or FastTokenizer(text)


def symbols_of(written: dict[str, Any]) -> SymbolTokenizer | None:
    """The tokenizer that nrgpt.hf.tokenizer.symbols has written down, if it is one."""
    try:
        vocabulary, pattern = written["model"]["vocab"], written["pre_tokenizer"]["pattern"]
        tokenizer = SymbolTokenizer(sorted(vocabulary, key=vocabulary.__getitem__))
        is_ours = pattern == {"Regex": tokenizer.pattern.pattern}
        is_ours &= written["model"]["type"] == "WordLevel" and tokenizer.number == vocabulary
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
    return tokenizer if is_ours else None
