"""The dataset of a run: found, or made."""

import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data.listops import prepare_listops
from ..data.shards import Dataset, TokenStream, to_device
from ..files import write_atomically
from .config import DataConfig

DATA = "NRGPT_DATA"
"""Environment variable: where prepared datasets live; ./data if it is not set."""


TOKENIZER = "tokenizer.json"
"""In a run folder: what its tokens mean."""


def keep_tokenizer(run: Path, dataset: Dataset) -> None:
    write_atomically(run / TOKENIZER, json.dumps(dataset.tokenizer.spec()) + "\n")


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
    with alone(folder):
        if not (folder / "manifest.json").exists():
            make(cfg, folder)
    return folder


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Runs that start together on a dataset which none has made yet wait for the first of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make(cfg: DataConfig, folder: Path) -> None:
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


def open_dataset(cfg: DataConfig, vocab_size: int, *, verify: bool = True) -> Dataset:
    """The dataset, once it is known to be whole, the one asked for, and within the vocabulary."""
    dataset = Dataset.open(dataset_folder(cfg), verify=verify)
    check_identity(cfg, dataset)
    if dataset.vocab_size > vocab_size:
        raise ValueError(
            f"model.vocab_size = {vocab_size}: {dataset.folder} has {dataset.vocab_size} tokens; "
            f"add model.vocab_size={dataset.vocab_size}"
        )
    return dataset


def check_identity(cfg: DataConfig, dataset: Dataset) -> None:
    """A folder that was named by hand may hold something else."""
    source = dataset.manifest["source"]
    kind = "listops" if "listops" in source else source.get("kind")
    is_text = cfg.task == "text" and kind != "listops"
    if kind != cfg.task and not is_text:
        raise ValueError(f"data.folder: {dataset.folder} holds {kind}, not {cfg.task} as data.task")
    if kind == "listops":
        wanted = json.loads(json.dumps(dataclasses.asdict(cfg.listops)))
        differ = [
            f"{key} = {source['listops'].get(key)!r}, not {value!r}"
            for key, value in wanted.items()
            if source["listops"].get(key) != value
        ]
        if differ:
            raise ValueError(f"data.folder: {dataset.folder} was made with {'; '.join(differ)}")


class Streams:
    """The tokens that several runs draw from, one stream after the other in one place: a batch for
    all runs is then one gather. Runs may share a stream."""

    def __init__(self, streams: Sequence[TokenStream], device: torch.device):
        self.streams, self.device = streams, device
        distinct = list(dict.fromkeys(streams))
        ends = list(itertools.accumulate(map(len, distinct), initial=0))
        self.begins = [ends[distinct.index(stream)] for stream in streams]
        self.together = distinct[0]
        if len(distinct) > 1:
            shards = [shard for stream in distinct for shard in stream.shards]
            self.together = TokenStream("all", shards)
        if device.type == "cuda":
            self.together = self.together.resident(device)

    def batch(
        self,
        seeds: Sequence[int],
        *,
        step: int,
        size: int,
        context: int,
        rank: int = 0,
        world: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets (runs, size / world, context) on the device. Each run has the batch
        that it would draw alone (TokenStream.batch)."""
        mine = slice(rank * size // world, (rank + 1) * size // world)
        starts = [
            begin + stream.starts_of(seed=seed, step=step, size=size, context=context)[mine]
            for begin, stream, seed in zip(self.begins, self.streams, seeds, strict=True)
        ]
        windows = self.together.windows(np.concatenate(starts), context + 1)
        windows = to_device(windows.unflatten(0, (len(seeds), -1)), self.device)
        return windows[..., :-1].contiguous(), windows[..., 1:].contiguous()
