"""The dataset of a run: found or prepared, checked, and read in batches."""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..check import check
from ..data.listops import prepare_listops
from ..data.masking import MaskedStream, Masking
from ..data.shards import MANIFEST, Dataset, TokenStream, to_device
from ..data.tokenizer import RANKS
from ..files import locked, missing_folders, sealed, write_atomically
from .config import DataConfig

DATA = "NRGPT_DATA"
"""Environment variable: the folder of prepared datasets; ./data if it is not set."""
TOKENIZER = "tokenizer.json"
"""In a run folder: the tokenizer of its dataset."""


def keep_tokenizer(run: Path, dataset: Dataset) -> None:
    """Put the dataset's tokenizer into the run folder, with the files that belong to it."""
    write_atomically(run / TOKENIZER, sealed(dataset.tokenizer.spec()))
    if RANKS in dataset.manifest["extra_files"]:
        write_atomically(run / RANKS, (dataset.folder / RANKS).read_bytes())


def data_root() -> Path:
    return Path(os.environ.get(DATA, "data"))


def located(folder: Path | str) -> Path:
    """A dataset's folder as it is written, or, if nothing is there, in NRGPT_DATA."""
    here, there = Path(folder), data_root() / folder
    is_there = not here.is_absolute() and not here.exists() and there.exists()
    return there if is_there else here


def dataset_folder(cfg: DataConfig) -> Path:
    if cfg.folder is not None:
        is_path = cfg.folder.strip() != "" and "\0" not in cfg.folder
        check(is_path, "data.folder", cfg.folder, "a folder's path, or None")
        return located(cfg.folder)
    root = data_root()
    if cfg.task != "listops":
        return root / cfg.task
    fields = json.dumps(dataclasses.asdict(cfg.listops), sort_keys=True)
    return root / f"listops-{hashlib.sha256(fields.encode()).hexdigest()[:12]}"


def prepare_dataset(cfg: DataConfig) -> Path:
    """The folder of the dataset, which is prepared if it is missing and that is possible. Of runs
    that start together, one prepares it, and the others wait."""
    folder = dataset_folder(cfg)
    if cfg.task == "text" and not (folder / MANIFEST).exists():
        raise FileNotFoundError(
            f"data.folder: there is no prepared dataset in {folder}; make one with "
            f"`nrgpt data text --to {folder} FILES...` or `nrgpt data hub --to {folder}`, or train "
            "on a file of your own with `nrgpt train --text FILE`"
        )
    prepared_once(folder, lambda: make(cfg, folder))
    return folder


def prepared_once(folder: Path, prepare: Callable[[], None]) -> None:
    """Prepare a dataset, unless it is there; others that want it too wait meanwhile."""
    if (folder / MANIFEST).exists():  # and may be on a disk that cannot be written to
        return
    made = missing_folders(folder.parent)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.parent / f".{folder.name}.lock"
    try:
        with locked(lock, wait=True):
            if not (folder / MANIFEST).exists():
                prepare()
    finally:
        for empty in reversed(made):
            with suppress(OSError):
                empty.rmdir()


def make(cfg: DataConfig, folder: Path) -> None:
    match cfg.task:
        case "listops":
            prepare_listops(cfg.listops, folder)
        case "shakespeare":
            from ..data.shakespeare import prepare_shakespeare

            prepare_shakespeare(folder)


def check_vocabulary(cfg: DataConfig, vocab_size: int, *, more: int = 0) -> None:
    """Refuse a vocabulary that ListOps does not fit into, before its data is drawn."""
    if cfg.task == "listops":
        check_fits("ListOps", cfg.listops.tokenizer().vocab_size, vocab_size, more)


def check_fits(what: str, tokens: int, vocab_size: int, more: int) -> None:
    """``more`` tokens are needed besides those of the data."""
    if tokens + more > vocab_size:
        beside = " and one stands for those that are missing" if more else ""
        raise ValueError(
            f"model.vocab_size = {vocab_size}: {what} has {tokens} tokens{beside}; "
            f"add model.vocab_size={tokens + more}"
        )


def open_dataset(
    cfg: DataConfig, vocab_size: int, *, more: int = 0, verify: bool = True
) -> Dataset:
    """Open the dataset. It must be intact and the one asked for, and fit into the vocabulary, with
    room for ``more`` tokens."""
    dataset = Dataset.open(dataset_folder(cfg), verify=verify)
    check_identity(cfg, dataset)
    check_fits(str(dataset.folder), dataset.vocab_size, vocab_size, more)
    return dataset


def check_identity(cfg: DataConfig, dataset: Dataset) -> None:
    """Raise an error if the folder holds another dataset than the configuration says."""
    source = dataset.manifest["source"]
    if not isinstance(source, dict) or not isinstance(source.get("listops", {}), dict):
        raise ValueError(f"data.folder: {dataset.folder}: its manifest names no source of the data")
    kind = "listops" if "listops" in source else source.get("kind")
    is_text = cfg.task == "text" and kind != "listops"
    if kind != cfg.task and not is_text:
        way_out = "; add data.task=text" if kind in ("text", "hub") else ""
        raise ValueError(
            f"data.folder: {dataset.folder} holds {kind}, not {cfg.task} as data.task{way_out}"
        )
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
    """The token streams of several runs, joined into one, so that a batch for all runs is a single
    gather. Runs may share a stream."""

    def __init__(
        self, streams: Sequence[TokenStream], device: torch.device, masking: Masking | None = None
    ):
        self.streams, self.device, self.masking = streams, device, masking
        distinct = list(dict.fromkeys(streams))
        ends = list(itertools.accumulate(map(len, distinct), initial=0))
        self.begins = [ends[distinct.index(stream)] for stream in streams]
        self.together = distinct[0]
        if len(distinct) > 1:
            shards = [shard for stream in distinct for shard in stream.shards]
            self.together = TokenStream("all", shards)
        if device.type == "cuda":
            self.together = self.together.resident(device)

    @property
    def of_one(self) -> TokenStream | MaskedStream:
        """Of the only run."""
        return self.together if self.masking is None else MaskedStream(self.together, self.masking)

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
        """Inputs and targets (runs, size / world, context) on the device. Each run gets the batch
        that it would get alone (TokenStream.batch)."""
        mine = slice(rank * size // world, (rank + 1) * size // world)
        starts = [
            begin + stream.starts_of(seed=seed, step=step, size=size, context=context)[mine]
            for begin, stream, seed in zip(self.begins, self.streams, seeds, strict=True)
        ]
        windows = self.together.windows(np.concatenate(starts), context + 1)
        windows = to_device(windows.unflatten(0, (len(seeds), -1)), self.device)
        if self.masking is not None:
            pairs = zip(windows[..., :-1], seeds, strict=True)
            masked = [self.masking(text, seed=seed, step=step, rank=rank) for text, seed in pairs]
            return torch.stack([x for x, _ in masked]), torch.stack([y for _, y in masked])
        return windows[..., :-1].contiguous(), windows[..., 1:].contiguous()
