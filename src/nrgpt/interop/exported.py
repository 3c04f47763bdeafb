"""Exports (`nrgpt export`) read back into nrgpt, without transformers."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..data.tokenizer import FastTokenizer, SymbolTokenizer, Tokenizer
from ..files import read_json
from ..language_model import LanguageModel
from ..model.config import ModelConfig
from .checksums import check_checksums
from .weights import CONFIG, align_memory, check_folder

PREFIX = "language_model."
"""What the wrapper for transformers puts before the name of each weight."""


def is_export(folder: Path) -> bool:
    """Whether this is an export, and not a run: whose configuration is unsound, is for its reader
    to say."""
    try:
        return bool(read_json(folder / CONFIG)["model_type"] == "nrgpt")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_export(folder: Path) -> LanguageModel:
    check_folder(folder)  # nothing else is said of a file that has changed
    fields = read_json(folder / CONFIG)
    if "quantization_config" in fields:
        raise ValueError(f"{folder} is quantised: only transformers can load it")
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    try:
        cfg = ModelConfig(**{name: value for name, value in fields.items() if name in known})
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: not the configuration of a model: {error}") from error
    weights: dict[str, Tensor] = {}
    for name in files_of(folder):
        try:
            weights |= load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(f"{folder / name}: not a file of tensors ({error})") from error
    strange = sorted(name for name in weights if not name.startswith(PREFIX))
    if strange:
        raise ValueError(f"{folder} is no export of nrgpt: it has weights {', '.join(strange)}")
    model = fitting(cfg, {k.removeprefix(PREFIX): w for k, w in weights.items()}, folder)
    align_memory(model)
    return model


def fitting(cfg: ModelConfig, weights: Mapping[str, Tensor], where: Path) -> LanguageModel:
    """The model of a configuration with these weights. That they fit is found before it is built:
    one that nobody trained could take all memory."""
    wrong = f"{where}: its configuration does not fit its weights"
    layers = max(cfg.steps if cfg.block == "gpt" else 0, cfg.prelude)
    if layers > len(weights):
        raise ValueError(f"{wrong}: {layers:,} layers, and {len(weights):,} weights")
    try:
        with torch.device("meta"):
            expected = LanguageModel(cfg).state_dict()
    except (RuntimeError, TypeError, OverflowError) as error:
        said = str(error).splitlines()[0]
        raise ValueError(f"{wrong}, nor any weights ({said})") from error
    if differ := sorted(expected.keys() ^ weights.keys()):
        raise ValueError(f"{wrong}: only one of both has {', '.join(differ[:5])}")
    for name, value in expected.items():
        if value.shape != weights[name].shape:
            shapes = f"{tuple(weights[name].shape)} instead of {tuple(value.shape)}"
            raise ValueError(f"{wrong}: {name} has shape {shapes}")
        if not weights[name].isfinite().all():
            raise ValueError(
                f"{where}: {name} holds numbers that are not finite: these weights are damaged, or "
                "their training diverged"
            )
    model = LanguageModel(cfg)
    model.load_state_dict(weights)
    return model


def files_of(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    return sorted(set(read_json(index)["weight_map"].values()))  # which check_folder has checked


def read_tokenizer(folder: Path) -> Tokenizer:
    """Characters and ListOps' symbols come back as what they were exported from; all others are
    read by the library ``tokenizers``."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file, and text needs a tokenizer")
    check_checksums(folder)
    try:
        return symbols_of(read_json(path)) or FastTokenizer(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a tokenizer ({error})") from error


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
