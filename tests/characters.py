"""A tiny trained character model, for tests of evaluation."""

import string
from pathlib import Path

from nrgpt.data.shakespeare import prepare_shakespeare
from nrgpt.model.config import ModelConfig
from nrgpt.train import loop
from nrgpt.train.config import DataConfig, OptimiserConfig, TrainConfig
from nrgpt.train.runs import Run, load_run

TEXT = (
    "The sun rises in the east. It sets in the west, and the night is long.\n"
    "A bird sings in the tree; nobody knows why. Who can say?\n\n"
) * 40


def character_run(folder: Path, iterations: int = 60, **model: object) -> Run:
    """Trained on a few sentences; every printable character is in the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(string.printable + TEXT)
    prepare_shakespeare(folder / "data", source=folder / "text.txt")
    fields = {"vocab_size": 100, "context": 48, "width": 16, "heads": 2, "steps": 3} | model
    cfg = TrainConfig(
        model=ModelConfig(**fields),  # type: ignore[arg-type]
        data=DataConfig(task="shakespeare", folder=str(folder / "data")),
        optimiser=OptimiserConfig(lr=1e-2, warmup=5),
        iterations=iterations,
        batch=8,
        log_every=iterations,
        eval_every=iterations,
        eval_batches=1,
        save_every=iterations,
        device="cpu",
    )
    loop.train(cfg, folder / "run")
    return load_run(folder / "run")
