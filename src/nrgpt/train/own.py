"""A training on a text of one's own: the data is prepared, and the model is fitted to it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.shards import Dataset
from ..data.text import prepare_text
from ..files import fingerprint
from .config import DataConfig, TrainConfig
from .data import data_root, prepared_once
from .overrides import override, replace

LEAST = 16
"""Tokens of context, at least."""


def prepare_own(files: Sequence[Path], *, tokenizer: str, vocabulary: int | None) -> Dataset:
    """The dataset of these files, in NRGPT_DATA. Its name has a hash of what determines it, so that
    the same call finds it again."""
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"--text {file}: there is no such file")
    content = hashlib.sha256(repr((tokenizer, vocabulary)).encode())
    for file in files:
        content.update(fingerprint(file)["sha256"].encode())
    # Not every name of a file is one that all libraries can open, and a hash must still fit.
    shown = "".join(c if c.isprintable() else "_" for c in files[0].name.partition(".")[0])
    name = f"{shown[:50]}-{content.hexdigest()[:10]}"
    folder = data_root() / name

    def prepare() -> None:
        prepare_text(files, folder, tokenizer=tokenizer, vocabulary=vocabulary)

    prepared_once(folder, prepare)
    return Dataset.open(folder, verify=False)


def fitted(base: TrainConfig, dataset: Dataset, overrides: Sequence[str]) -> TrainConfig:
    """The configuration for a dataset: its vocabulary, and a context that its splits can fill.
    ``overrides`` come last."""
    shortest = min(len(dataset.tokens(split)) for split in ("train", "val"))
    context = min(base.model.context, shortest - 1)
    if context < LEAST:
        raise ValueError(
            f"{dataset.folder}: {shortest} tokens for validation are too few; a text needs about "
            f"{20 * LEAST} at least"
        )
    changes: dict[str, Any] = {
        "model.vocab_size": dataset.vocab_size,
        "model.context": context,
        "data": DataConfig(task="text", folder=str(dataset.folder)),
    }
    return override(replace(base, changes), overrides)
