"""How fast do models learn at first, by how they begin? One CPU core, two minutes a row.

python -m experiments.early_learning.compare [--iterations N] [NAME ...]

Appends to results.jsonl; summary.md is made from it.
"""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from experiments import training
from nrgpt.language_model import LanguageModel
from nrgpt.reproduce.tables import markdown, write_text
from nrgpt.train.overrides import override
from nrgpt.train.presets import PRESETS

HERE = Path(__file__).parent
SETTINGS = (
    "batch=16", "model.context=128", "model.dropout=0", "model.heads=4", "model.steps=6",
    "optimiser.lr=0.003", "optimiser.muon_lr=0.03", "optimiser.final=0.1",
)  # fmt: skip
NRGPT, WIDE = "nrgpt_ff2w", "model.width=96"
BY_MUON, FROM_4 = "optimiser.muon_eta=true", "model.alpha_init=4"
CASES: dict[str, tuple[str, ...]] = {
    "GPT, 4 layers of width 48": ("gpt", "model.width=48", "model.steps=4"),
    "RGPT-parallel": ("rgpt_parallel", WIDE),
    "NRGPT FF2W": (NRGPT, WIDE),
    "alpha from 2": (NRGPT, WIDE, "model.alpha_init=2"),
    "alpha from 4": (NRGPT, WIDE, "model.alpha_init=4"),
    "alpha from 8": (NRGPT, WIDE, "model.alpha_init=8"),
    "alpha from 16": (NRGPT, WIDE, "model.alpha_init=16"),
    "eta from 3": (NRGPT, WIDE, "model.rate_scale=3"),
    "eta from 10": (NRGPT, WIDE, "model.rate_scale=10"),
    "eta from 0.3": (NRGPT, WIDE, "model.rate_scale=0.3"),
    "a free eta for each step": (NRGPT, WIDE, "model.rate=free_per_step"),
    "twice Muon's rate": (NRGPT, WIDE, "optimiser.muon_lr=0.06"),
    "all weights 4 times as large": (NRGPT, WIDE, "model.init_std=0.08"),
    "3 steps": (NRGPT, WIDE, "model.steps=3"),
    "12 steps": (NRGPT, WIDE, "model.steps=12"),
    "12 heads": (NRGPT, WIDE, "model.heads=12"),
    "eta by Muon": (NRGPT, WIDE, BY_MUON),
    "eta by Muon, alpha from 4": (NRGPT, WIDE, BY_MUON, FROM_4),
    "eta by Muon, alpha from 8": (NRGPT, WIDE, BY_MUON, "model.alpha_init=8"),
    "eta by Muon, alpha from 4, 12 steps": (NRGPT, WIDE, BY_MUON, FROM_4, "model.steps=12"),
    "eta by Muon, alpha from 4, eta from 0.3": (
        NRGPT,
        WIDE,
        BY_MUON,
        FROM_4,
        "model.rate_scale=0.3",
    ),
    "eta = 1, alpha from 4": (NRGPT, WIDE, FROM_4, "model.rate=identity"),
    "2 full-rank heads": (NRGPT, WIDE, "model.coupling=full", "model.heads=2"),
}


def train(name: str, iterations: int) -> None:
    kind, *fields = CASES[name]
    length = (f"iterations={iterations}", f"optimiser.warmup={iterations // 10}")
    cfg = override(PRESETS[f"shakespeare_{kind}"](), [*SETTINGS, *length, *fields])
    torch.manual_seed(cfg.seed)
    model = LanguageModel(cfg.model)
    began = time.perf_counter()
    losses = training.train(model, cfg, training.batches(cfg, "train", cfg.seed))
    row = {
        "case": name,
        "iterations": iterations,
        "parameters": model.parameter_counts().tied,
        "val_loss": training.mean_loss(model, training.batches(cfg, "val", cfg.seed + 1), 40),
        "train_losses": [round(sum(losses[i : i + 10]) / 10, 4) for i in range(0, iterations, 10)],
        "seconds": round(time.perf_counter() - began),
        "fields": fields,
    }
    training.add_row(HERE / "results.jsonl", row)


def summarise() -> None:
    rows = training.read_rows(HERE / "results.jsonl")
    order = {name: number for number, name in enumerate(CASES)}
    rows.sort(key=lambda row: (row["iterations"], order[row["case"]]))
    lines = [
        [row["iterations"], row["case"], f"{row['parameters']:,}", f"{row['val_loss']:.3f}"]
        for row in rows
    ]
    headings = ["iterations", "model, or change from NRGPT FF2W", "parameters", "validation loss"]
    write_text(HERE / "summary.md", markdown(headings, lines))


def main(
    names: Annotated[list[str] | None, typer.Argument()] = None, iterations: int = 300
) -> None:
    torch.set_num_threads(1)
    training.check_names(names or CASES, CASES)
    for name in names or CASES:
        train(name, iterations)
    summarise()


if __name__ == "__main__":
    typer.run(main)
