"""One change at a time from a small NRGPT on text. One CPU core, two to eight minutes a row.

python -m experiments.text_levers.text_levers DATA [NAME[:SEED] ...]

DATA is a dataset of GPT-2 tokens (nrgpt data text). Appends to results.jsonl; summary.md is made
from it.
"""

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from experiments.levers.levers import OTHER_MODELS
from torch import Tensor

from experiments import training
from nrgpt.data.shards import Dataset
from nrgpt.language_model import LanguageModel
from nrgpt.reproduce.tables import markdown, write_text
from nrgpt.train.config import TrainConfig
from nrgpt.train.overrides import override
from nrgpt.train.presets import PRESETS

HERE = Path(__file__).parent

VOCABULARY, UPDATES, BATCH, CONTEXT = 8_192, 800, 8, 128
LONG = (f"iterations={4 * UPDATES}",)
EVALUATED = {"a quarter": 4, "half": 2, "all": 1}
"""Parts of a training after which it is evaluated, and what they divide its updates by."""
BASE = (
    f"model.vocab_size={VOCABULARY}", f"model.context={CONTEXT}", f"batch={BATCH}",
    "accumulation=1", f"iterations={UPDATES}", "compile=false", "precision=fp32",
    "optimiser.lr=0.003", "optimiser.warmup=100", "model.rate=free",
)  # fmt: skip
NRGPT = "owt_nrgpt_ff2w_equal_parameters"
RGPT = "owt_rgpt_parallel_equal_parameters"
WIDE = ("model.width=112", "model.heads=7")
CERTIFIED = ("owt_nrgpt_certified", (*WIDE, "model.steps=6", "model.rate=gamma_per_step"))
GPT = ("model.width=64", "model.heads=4", "model.steps=8")
LEVERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "NRGPT FF2W, 6 steps": (NRGPT, (*WIDE, "model.steps=6")),
    "12 steps": (NRGPT, (*WIDE, "model.steps=12")),
    "4 steps": (NRGPT, (*WIDE, "model.steps=4")),
    "3 steps": (NRGPT, (*WIDE, "model.steps=3")),
    "2 steps": (NRGPT, (*WIDE, "model.steps=2")),
    "Muon 0.04": (NRGPT, (*WIDE, "model.steps=6", "optimiser.muon_lr=0.04")),
    "Muon 0.01": (NRGPT, (*WIDE, "model.steps=6", "optimiser.muon_lr=0.01")),
    "rates fall to 1 %": (NRGPT, (*WIDE, "model.steps=6", "optimiser.final=0.01")),
    "rates fall to 30 %": (NRGPT, (*WIDE, "model.steps=6", "optimiser.final=0.3")),
    "beta 0.5 instead of 0.25": (NRGPT, (*WIDE, "model.steps=6", "model.beta=0.5")),
    "a norm for each step": (NRGPT, (*WIDE, "model.steps=6")),
    "an eta for each term": (NRGPT, (*WIDE, "model.steps=6", "model.rate=free_per_term")),
    "GPT, 8 layers": ("owt_gpt", GPT),
    "GPT, 4 layers of width 88": ("owt_gpt", ("model.width=88", "model.heads=4", "model.steps=4")),
    "GPT, rates fall to 1 %": ("owt_gpt", (*GPT, "optimiser.final=0.01")),
    "GPT, rates fall to 30 %": ("owt_gpt", (*GPT, "optimiser.final=0.3")),
    "RGPT-parallel, 6 steps": (RGPT, ("model.width=108", "model.heads=6", "model.steps=6")),
    "RGPT-parallel, 3 steps": (RGPT, ("model.width=108", "model.heads=6", "model.steps=3")),
    "RGPT-parallel of width 64, 8 steps": ("owt_rgpt_parallel", GPT),
    "certified": CERTIFIED,
    "certified, alpha learned": (CERTIFIED[0], (*CERTIFIED[1], "model.learn_alpha=true")),
    "certified, alpha learned from 4": (
        CERTIFIED[0],
        (*CERTIFIED[1], "model.alpha_init=4", "model.learn_alpha=true"),
    ),
    "NRGPT, 12 steps, long": (NRGPT, (*WIDE, "model.steps=12", *LONG)),
    "NRGPT, 6 steps, long": (NRGPT, (*WIDE, "model.steps=6", *LONG)),
    "GPT, 8 layers, long": ("owt_gpt", (*GPT, *LONG)),
}


def frequent_tokens(folder: Path) -> tuple[Tensor, Tensor]:
    """Training and validation text; all but the most frequent tokens are one and the same."""
    streams = [Dataset.open(folder).tokens(name) for name in ("train", "val")]
    splits = [stream.read(0, len(stream)) for stream in streams]
    counts = np.bincount(splits[0], minlength=1 << 16)
    number = np.full(1 << 16, VOCABULARY - 1)
    number[np.argsort(-counts)[: VOCABULARY - 1]] = np.arange(VOCABULARY - 1)
    train, val = (torch.from_numpy(number[tokens]) for tokens in splits)
    return train, val


def windows(tokens: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=draw)
    text = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts])
    return text[:, :-1], text[:, 1:]


def configuration(name: str, seed: int) -> TrainConfig:
    preset, fields = LEVERS[name]
    return override(PRESETS[preset](), [*BASE, *fields, f"seed={seed}"])


def train(name: str, seed: int, texts: tuple[Tensor, Tensor]) -> None:
    cfg = configuration(name, seed)
    torch.manual_seed(seed)
    model = OTHER_MODELS.get(name, LanguageModel)(cfg.model)
    validation = {}

    def evaluate(updates: int) -> None:
        if updates in [cfg.iterations // part for part in EVALUATED.values()]:
            loss = training.mean_loss(model, partial(windows, texts[1], 777), 60)
            validation[updates] = round(loss, 4)

    began = time.perf_counter()
    losses = training.train(model, cfg, partial(windows, texts[0], seed), evaluate)
    row = {
        "lever": name,
        "seed": seed,
        "updates": cfg.iterations,
        "parameters": training.learned_parameters(model),
        "train_loss": round(statistics.fmean(losses[-100:]), 4),
        "val_loss": validation,
        "seconds": round(time.perf_counter() - began),
    }
    training.add_row(HERE / "results.jsonl", row)


def summarise() -> None:
    rows = training.read_rows(HERE / "results.jsonl")
    lines = []
    for name in LEVERS:
        own = sorted((row for row in rows if row["lever"] == name), key=lambda row: row["seed"])
        if not own:
            continue
        trained = " ".join(f"{row['train_loss']:.3f}" for row in own)
        line = [name, f"{own[0]['parameters']:,}", f"{own[0]['updates']:,}", trained]
        for part in EVALUATED.values():
            step = str(own[0]["updates"] // part)
            line.append(" ".join(f"{row['val_loss'][step]:.3f}" for row in own))
        lines.append(line)
    headings = ["model or change", "parameters", "updates", "training"]
    headings += [f"validation after {part}" for part in EVALUATED]
    write_text(HERE / "summary.md", markdown(headings, lines))


def main(data: Path, runs: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    torch.set_num_threads(1)
    wanted = [run.partition(":") for run in runs or LEVERS]
    training.check_names([name for name, *_ in wanted], LEVERS)
    for name, _, seed in wanted:
        if seed and not seed.isdecimal():
            raise typer.BadParameter(f"{name}:{seed}: a seed must be a number")
    texts = frequent_tokens(data)
    for name, _, seed in wanted:
        train(name, int(seed or 0), texts)
    summarise()


if __name__ == "__main__":
    typer.run(main)
