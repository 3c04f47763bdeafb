"""Run folders: configuration, model and tokenizer of a run."""

import dataclasses
import functools
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .. import zoo
from ..check import from_dict
from ..data.listops import as_written
from ..data.shards import Dataset, TokenStream
from ..data.tokenizer import Tokenizer, load_tokenizer
from ..files import Changed, read_sealed, sealed, unsealed, write_atomically
from ..interop.exported import fitting
from ..language_model import LanguageModel
from ..model.registry import PLUGINS
from .checkpoint import CheckpointError, checkpoints, fault_of, newest_valid, read_state
from .config import BOOKKEEPING, TrainConfig
from .data import TOKENIZER, open_dataset, prepare_dataset
from .overrides import known_names
from .report import environment
from .sharded import weights_of


@dataclass(frozen=True, repr=False)
class Run:
    folder: Path
    cfg: TrainConfig
    model: LanguageModel
    step: int
    faults: tuple[str, ...] = ()
    """What was wrong with the checkpoints that were not used."""

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, checkpoint {self.step}, {self.model.summary()})"

    def dataset(self, *, verify: bool = True) -> Dataset:
        """The dataset it was trained on, made again if it is missing and that is possible."""
        prepare_dataset(self.cfg.data)
        return open_dataset(self.cfg.data, self.cfg.model.vocab_size, verify=verify)

    def first_tokens(self, split: str, count: int) -> TokenStream:
        """A stream that begins with the first ``count`` tokens of a split: those kept in the run
        folder, as models of the zoo have them, else the dataset's."""
        kept = self.folder / f"{split}.txt"
        if kept.is_file():
            tokens = self.tokenizer.encode(kept.read_text(encoding="utf-8"))
            if len(tokens) >= count:
                return TokenStream(split, [np.array(tokens)])
        return self.dataset().tokens(split)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The one kept in the run folder, so that the dataset is not needed; else the dataset's."""
        kept = self.folder / TOKENIZER
        if not kept.is_file():
            return self.dataset(verify=False).tokenizer
        try:
            return load_tokenizer(read_sealed(kept), self.folder)
        except Changed:
            raise
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{kept}: not a tokenizer ({error}); remove it to use that of the dataset"
            ) from error

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. A ListOps expression may be written as people write it."""
        return as_written(self.tokenizer).encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return as_written(self.tokenizer).decode(tokens)


def load_run(folder: Path | str, step: int | None = None, *, device: str = "cpu") -> Run:
    """The model of a run (a folder, or zoo:NAME) at its best checkpoint or at that of a given
    iteration, for evaluation.

    If the best checkpoint is gone or damaged, the newest intact one is used. A training that goes
    on meanwhile may remove a checkpoint while it is being read; then the newer one is.
    """
    folder = zoo.resolve(folder)
    cfg = read_config(check_is_run(folder))
    chosen, faults, weights = read_steadily(folder, step)
    model = fitting(cfg.model, weights, chosen)
    number = int(chosen.name.removeprefix("step-"))
    return Run(folder, cfg, model.to(device).eval(), number, tuple(faults))


def check_is_run(folder: Path) -> Path:
    """The path of its configuration."""
    config = folder / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{folder} is not a run: there is no {config}")
    return config


def read_steadily(
    folder: Path, step: int | None, tries: int = 100
) -> tuple[Path, list[str], dict[str, Tensor]]:
    """The checkpoint to load, what is wrong with newer ones, and its weights."""
    before: list[str] | None = None
    for left in reversed(range(tries)):
        try:
            chosen, faults = choose(folder, step)
            return chosen, faults, weights_of(chosen)
        except (OSError, CheckpointError):
            there = [path.name for path in checkpoints(folder / "checkpoints")]
            if there == before or not left:  # nobody changes them: it is not a matter of timing
                raise
            before = there
    raise AssertionError("unreachable")


def choose(folder: Path, step: int | None) -> tuple[Path, list[str]]:
    """The checkpoint to load, and what is wrong with newer ones."""
    saved = folder / "checkpoints"
    newest, faults = newest_valid(saved)
    if newest is None:
        said = f" ({'; '.join(faults)})" if faults else ""
        raise FileNotFoundError(
            f"{folder} has no valid checkpoint{said}; train it again (if it was finished and its "
            "checkpoints were deleted, remove the folder first)"
        )
    state = read_state(newest)
    wanted = state["best"].get("step", state["step"]) if step is None else step
    chosen = saved / f"step-{int(wanted):08d}"
    if step is not None and not chosen.is_dir():
        kept = ", ".join(path.name for path in reversed(checkpoints(saved)))
        raise FileNotFoundError(f"step = {step}: {folder} keeps {kept}")
    if chosen != newest and (fault := fault_of(chosen)):  # the newest is known to be intact
        if step is not None:
            raise CheckpointError(fault)
        chosen = newest
    return chosen, faults


def check_config(cfg: TrainConfig, run: Path) -> None:
    """Refuse a folder that holds a run of another configuration."""
    path = run / "config.json"
    if path.exists():
        differ = differences(read_config(path), cfg)
        if "iterations" in differ:
            print(f"{differ['iterations']}: the learning rate's schedule stretches with it")
        changed = [text for name, text in differ.items() if name not in BOOKKEEPING]
        if changed:
            raise ValueError(
                f"{run} holds a run of another configuration ({'; '.join(changed)}); choose "
                "another folder with --to, or remove this one"
            )


def write_config(cfg: TrainConfig, run: Path) -> None:
    write_atomically(run / "config.json", sealed(dataclasses.asdict(cfg)))
    write_atomically(run / "environment.json", json.dumps(environment(), indent=1))


def read_config(path: Path) -> TrainConfig:
    """The configuration in a run's config.json. Fields that were added since have their default."""
    return config_of(read_sealed(path), path)


def config_of(fields: Mapping[str, Any], where: Path | str) -> TrainConfig:
    """The configuration of a stored run. Its plugins must have been loaded before: opening a run
    folder must never run code."""
    fields = unsealed(fields, where)
    for plugin in fields.get("plugins", ()):
        if plugin not in PLUGINS:
            raise ValueError(
                f"{where}: this run has energies of the plugin {plugin!r}; if you trust that code, "
                f"name it: --plugin {plugin} (from Python, nrgpt.load_plugin({plugin!r}))"
            )
    try:
        return from_dict(TrainConfig, fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: not the configuration of a run: {error}") from error


def read_result(run: Path) -> dict[str, Any]:
    return read_sealed(run / "result.json")


def is_finished(cfg: TrainConfig, run: Path) -> bool:
    """Whether a run has the result of its last iteration."""
    return (run / "result.json").exists() and read_result(run).get("step") == cfg.iterations


def differences(stored: TrainConfig, cfg: TrainConfig) -> dict[str, str]:
    """The fields in which a stored configuration differs from this one."""
    values = {name: operator.attrgetter(name) for name in known_names(cfg)}
    return {
        name: f"{name}: {value(stored)!r} -> {value(cfg)!r}"
        for name, value in values.items()
        if value(stored) != value(cfg)
    }
