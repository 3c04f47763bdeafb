"""What the scripts here share: small trainings on one CPU core, and what records say.

Run the scripts as modules, from the root of the repository: python -m experiments.levers.levers
"""

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nrgpt.check import from_dict
from nrgpt.model.network import Network
from nrgpt.reproduce.common import facts, with_seconds
from nrgpt.reproduce.records import Record
from nrgpt.reproduce.tables import Row
from nrgpt.train.config import TrainConfig
from nrgpt.train.data import open_dataset, prepare_dataset
from nrgpt.train.optim import make_optimisers, rate_at, set_rate

Batch = tuple[Tensor, Tensor]
Batches = Callable[[int], Batch]
"""The number of a batch -> its tokens and targets."""


def batches(cfg: TrainConfig, split: str, seed: int) -> Batches:
    """Random windows of a split."""
    prepare_dataset(cfg.data)
    tokens = open_dataset(cfg.data, cfg.model.vocab_size).tokens(split)
    sizes = {"size": cfg.batch, "context": cfg.model.context}
    return lambda number: tokens.batch(seed=seed, step=number, **sizes)


def train(
    model: Network, cfg: TrainConfig, batch: Batches, after: Callable[[int], Any] | None = None
) -> list[float]:
    """Train for all iterations; returns their losses. ``after`` is called after each update with
    the number of updates so far."""
    optimisers = make_optimisers(model, cfg.optimiser, torch.device("cpu"))
    draw = torch.Generator().manual_seed(cfg.seed)
    losses = []
    for t in range(cfg.iterations):
        set_rate(optimisers, rate_at(t, cfg.iterations, cfg.optimiser))
        steps = None
        if cfg.random_steps:
            least, most = cfg.random_steps
            steps = int(torch.randint(least, most + 1, (), generator=draw))
        _, loss = model(*batch(t), steps=steps, want_logits=False)
        model.zero_grad()
        loss.backward()
        if cfg.optimiser.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optimiser.clip)
        for optimiser in optimisers:
            optimiser.step()
        losses.append(loss.item())
        if after is not None:
            after(t + 1)
    return losses


@torch.no_grad()
def mean_loss(model: Network, batch: Batches, number: int) -> float:
    """Over the first batches: the same ones for all models."""
    model.eval()
    losses = [model(*batch(t), want_logits=False)[1].item() for t in range(number)]
    model.train()
    return statistics.fmean(losses)


def learned_parameters(model: Network) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def add_row(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def check_names(names: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            raise SystemExit(f"{name!r}: must be one of {', '.join(known)}")


def of_record(record: Record) -> tuple[TrainConfig, Row, list[Row]]:
    """A run's configuration, what a row of results says of it, and its estimates."""
    cfg = from_dict(TrainConfig, record.read("config.json"))
    entries = with_seconds(record.read("metrics.jsonl"), cfg)
    return cfg, facts(cfg, record, entries), [e for e in entries if "val_loss" in e]
