"""What the parts of the study share: texts of a run, losses with their errors, results on disk."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nrgpt.train.runs import Run, load_run

screen = Console()


@dataclass(frozen=True)
class Study:
    """Which runs to look at, how closely, and where the results go."""

    runs: tuple[Path, ...]
    to: Path
    device: str = "cpu"
    tokens: int | None = None
    """Of the validation split, for the parts that take many; None is all of them."""
    quick: bool = False
    """Everything at its smallest: to see that it works, not what comes out."""

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def open(self) -> Iterator[Run]:
        for folder in self.runs:
            screen.rule(folder.name)
            yield load_run(folder, device=self.device)


class Results:
    """A JSON file that is written after every piece: what was interrupted is not lost."""

    def __init__(self, path: Path):
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, run: Run, key: str, value: Any) -> None:
        entry = self.found.setdefault(run.folder.name, {"checkpoint": run.step})
        entry[key] = value
        self.path.write_text(json.dumps(plain(self.found), indent=1, allow_nan=False))


def plain(value: Any) -> Any:
    """For JSON, which has no tensors and nothing that is not a number: None stands for that."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def windows(run: Run, tokens: int | None, split: str = "val") -> Tensor:
    """Texts one behind the other, each a context and the token after it, (texts, context + 1):
    spread over the split if fewer tokens are asked for than it has."""
    stream = run.dataset(verify=False).tokens(split)
    length = min(run.cfg.model.context, len(stream) - 1)
    there = (len(stream) - 1) // length
    count = there if tokens is None else max(1, min(there, tokens // length))
    starts = [i * there // count * length for i in range(count)]
    rows = [torch.from_numpy(stream.read(start, length + 1)) for start in starts]
    return torch.stack(rows).to(run.model.tokens.device)


def batches(text: Tensor, size: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets."""
    for some in text.split(size):
        yield some[:, :-1], some[:, 1:]


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().mT, targets, reduction="none").cpu()


@dataclass(frozen=True)
class Mean:
    """Of something per token, over texts: its error is that of the texts' means, which are not as
    dependent on each other as the tokens of one text."""

    value: float
    error: float


def mean(per_token: Tensor) -> Mean:
    texts = per_token.double().flatten(1).mean(1)
    spread = texts.std().item() if len(texts) > 1 else math.nan
    return Mean(texts.mean().item(), spread / math.sqrt(len(texts)))


def show(title: str, headings: list[str], rows: list[list[Any]]) -> None:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    screen.print(table)
