"""The dataset of a run: found, or made."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

from ..data.listops import prepare_listops
from ..data.shards import Dataset
from .config import DataConfig

DATA = "NRGPT_DATA"
"""Environment variable: where prepared datasets live; ./data if it is not set."""


def dataset_folder(cfg: DataConfig) -> Path:
    if cfg.folder is not None:
        return Path(cfg.folder)
    root = Path(os.environ.get(DATA, "data"))
    if cfg.task != "listops":
        return root / cfg.task
    fields = json.dumps(dataclasses.asdict(cfg.listops), sort_keys=True)
    return root / f"listops-{hashlib.sha256(fields.encode()).hexdigest()[:12]}"


def prepare_dataset(cfg: DataConfig) -> Path:
    """The folder of the dataset, made first if it is missing and can be made unasked."""
    folder = dataset_folder(cfg)
    if (folder / "manifest.json").exists():
        return folder
    match cfg.task:
        case "listops":
            prepare_listops(cfg.listops, folder)
        case "shakespeare":
            from ..data.shakespeare import prepare_shakespeare

            prepare_shakespeare(folder)
        case "text":
            raise FileNotFoundError(
                f"data.folder: there is no prepared dataset in {folder}; make one with "
                f"`nrgpt data text --to {folder} FILES...` or `nrgpt data hub --to {folder}`"
            )
    return folder


def open_dataset(cfg: DataConfig, vocab_size: int) -> Dataset:
    dataset = Dataset.open(dataset_folder(cfg))
    if dataset.vocab_size > vocab_size:
        raise ValueError(
            f"model.vocab_size = {vocab_size}: {dataset.folder} has {dataset.vocab_size} tokens"
        )
    return dataset
