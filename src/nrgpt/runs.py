"""Run folders, from the reader's side: the model, its tokenizer and its configuration."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from .config import from_dict
from .data.shards import Dataset
from .data.tokenizer import Tokenizer
from .model import LanguageModel
from .train.checkpoint import FILES, newest_valid, verify
from .train.config import TrainConfig
from .train.data import dataset_folder


@dataclass(frozen=True)
class Run:
    folder: Path
    cfg: TrainConfig
    model: LanguageModel
    step: int

    def dataset(self) -> Dataset:
        return Dataset.open(dataset_folder(self.cfg.data))

    def tokenizer(self) -> Tokenizer:
        return self.dataset().tokenizer


def load_run(folder: Path, step: int | None = None) -> Run:
    """The model of a run at its best checkpoint, or at a given step, without its optimiser."""
    config = folder / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{folder} is not a run: there is no {config}")
    cfg = from_dict(TrainConfig, json.loads(config.read_text()))
    newest, faults = newest_valid(folder / "checkpoints")
    if newest is None:
        said = f" ({'; '.join(faults)})" if faults else ""
        raise FileNotFoundError(f"{folder} has no valid checkpoint{said}")
    state = json.loads((newest / "state.json").read_text())
    if step is None:
        step = int(state["best"].get("step", state["step"]))
    chosen = folder / "checkpoints" / f"step-{step:08d}"
    if not chosen.is_dir():
        kept = ", ".join(path.name for path in sorted(chosen.parent.glob("step-*")))
        raise FileNotFoundError(f"step = {step}: {folder} keeps {kept}")
    verify(chosen)
    model = LanguageModel(cfg.model)
    model.load_state_dict(load_file(chosen / FILES[0]))
    return Run(folder, cfg, model.eval(), step)
