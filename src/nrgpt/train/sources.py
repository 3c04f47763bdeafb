"""Where a training may come from: a configuration file, and the weights of another model."""

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import zoo
from ..data.tokenizer import Tokenizer
from ..interop.exported import is_export, read_export, read_tokenizer
from ..language_model import LanguageModel
from ..model.config import ModelConfig
from .config import TrainConfig
from .overrides import known_names, replace
from .runs import config_of, load_run

CONTEXT = "positions"
"""The weight whose first rows a shorter context takes."""


def read_file(path: Path, preset: Callable[[str], TrainConfig]) -> TrainConfig:
    """A configuration from a .json or .toml file, as a run's config.json has it. What is not named
    has its default, or that of ``preset``, which the file may name. In TOML, "none" is None."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        text = path.read_text(encoding="utf-8")
        fields = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("it holds no fields")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a configuration ({error})") from error
    try:
        base = fields.pop("preset", None)
        if base is None and path.suffix == ".json":
            return config_of(fields, path)
        cfg = TrainConfig() if base is None else preset(base)
        return replace(cfg, flat(fields, known_names(cfg)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def flat(fields: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested groups by dotted names. Those of ListOps' data are a group too."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        full = prefix + name
        if isinstance(value, Mapping):
            found |= flat(value, known, f"{full}.")
        else:
            takes_none = type(None) in getattr(known.get(full), "__args__", ())
            found[full] = None if takes_none and value == "none" else value
    return found


def open_source(source: str) -> tuple[LanguageModel, Tokenizer]:
    """The model that init_from names, and its tokenizer."""
    folder = zoo.resolve(source.removeprefix("hf:"))
    if is_export(folder):
        return read_export(folder), read_tokenizer(folder)
    run = load_run(folder)
    return run.model, run.tokenizer


def model_of(source: str) -> ModelConfig:
    return open_source(source)[0].cfg


def weights_from(source: str, model: LanguageModel, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """The weights of another model, for this one. Its context may be shorter, and whatever has no
    weights may differ: the number of steps of a recurrent model, dropout, the masks. The tokenizer
    must give the same numbers."""
    other, theirs = open_source(source)
    place = f"init_from = {source!r}"
    check_tokens(place, theirs, tokenizer)
    found, own = dict(other.state_dict()), model.state_dict()
    context = model.cfg.context
    if CONTEXT in found and context < len(found[CONTEXT]):
        found[CONTEXT] = found[CONTEXT][:context].clone()
    differ = sorted(found.keys() ^ own.keys())
    if differ:
        raise ValueError(
            f"{place} is another kind of model: only one of both has {', '.join(differ)}"
        )
    for name, value in own.items():
        if value.shape != found[name].shape:
            raise ValueError(
                f"{place}: {name} has shape {tuple(found[name].shape)}, and this model wants "
                f"{tuple(value.shape)}; its shape is {other.summary()}"
            )
    return {name: value.to(own[name].dtype) for name, value in found.items()}


def check_tokens(place: str, theirs: Tokenizer, ours: Tokenizer) -> None:
    """Tokenizers of different kinds may agree: an export's is written differently."""
    if theirs.vocab_size != ours.vocab_size:
        raise ValueError(
            f"{place}: its vocabulary has {theirs.vocab_size} tokens, and the dataset's "
            f"{ours.vocab_size}; prepare the data with its tokenizer"
        )
    for token in range(theirs.vocab_size):
        if theirs.decode([token]).strip() != ours.decode([token]).strip():
            raise ValueError(
                f"{place}: token {token} is {theirs.decode([token])!r} there and "
                f"{ours.decode([token])!r} in the dataset; prepare the data with its tokenizer"
            )
