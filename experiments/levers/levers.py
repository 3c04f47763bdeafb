"""One change at a time from a small NRGPT on Shakespeare. One CPU core, four minutes a row.

python -m experiments.levers.levers [--seeds 0,1] [NAME ...]

Appends to results.jsonl; summary.md is made from it.
"""

import copy
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from experiments import training
from nrgpt.language_model import LanguageModel
from nrgpt.reproduce.tables import grouped, markdown, write_text
from nrgpt.train.config import TrainConfig
from nrgpt.train.overrides import override
from nrgpt.train.presets import CERTIFIED, PRESETS

HERE = Path(__file__).parent
BASE = (
    "iterations=600", "batch=16", "model.context=128", "model.dropout=0", "model.width=96",
    "model.heads=4", "model.steps=6", "model.alpha_init=4", "optimiser.lr=0.003",
    "optimiser.muon_lr=0.03", "optimiser.muon_eta=true",
)  # fmt: skip
AVERAGES = (0.98, 0.995)


class Injected(LanguageModel):
    """Every step adds the embedding again, by a learned weight for each dimension: the force of
    an energy that is linear in g."""

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        self.injection = nn.Parameter(torch.full((cfg.width,), 0.1))

    def states(self, *arguments: Any, **options: Any) -> Iterator[Tensor]:
        first = x = next(super().states(*arguments, **options))
        yield x
        (plan,) = self.plan()
        for t in range(self.cfg.steps):
            x = plan.move(x, t) + self.injection * first
            yield x


class NormEachStep(LanguageModel):
    """A norm of its own for each step."""

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        norm = self.blocks[0].norm
        self.norms = nn.ModuleList(copy.deepcopy(norm) for _ in range(cfg.steps))
        norm.requires_grad_(False)

    def states(self, *arguments: Any, **options: Any) -> Iterator[Tensor]:
        x = next(super().states(*arguments, **options))
        yield x
        (plan,) = self.plan()
        for t in range(self.cfg.steps):
            plan.norm, plan.normalise = self.norms[t], self.norms[t].function()
            x = plan.move(x, t)
            yield x


class EtaEachStep(LanguageModel):
    """A matrix eta of its own for each step (the package's free_per_step, but learned by Muon)."""

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        block = self.blocks[0]
        block.each = nn.ModuleList(
            nn.ModuleDict({"rate": copy.deepcopy(block.rate)}) for _ in range(cfg.steps)
        )
        block.rate.requires_grad_(False)

    def states(self, *arguments: Any, **options: Any) -> Iterator[Tensor]:
        x = next(super().states(*arguments, **options))
        yield x
        block = self.blocks[0]
        shared = block.rate
        for t in range(self.cfg.steps):
            block._modules["rate"] = block.each[t]["rate"]
            x = self.plan()[0].move(x, t)
            block._modules["rate"] = shared
            yield x


CERTIFIED_ENERGY = tuple(
    f"model.{name}={CERTIFIED[name]}" for name in ("feedforward", "potential", "hidden_factor")
)
WITHIN_NOISE = ("optimiser.decay=linear", "model.beta=0.4", "optimiser.weight_decay=0.3")
LEVERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "alpha from 1, eta by AdamW": ("model.alpha_init=1", "optimiser.muon_eta=false"),
    "embedding injected at every step": (),
    "a norm for each step": (),
    "RMSNorm": ("model.norm=rmsnorm",),
    "potential relu2, hidden 8D": CERTIFIED_ENERGY,
    "random steps 4 - 8": ("random_steps=(4,8)",),
    "no weight decay": ("optimiser.weight_decay=0",),
    "weight decay 0.3": ("optimiser.weight_decay=0.3",),
    "untied embedding": ("model.tied=false",),
    "a factor before the feed-forward energy": ("model.feedforward_scale=true",),
    "eta = U^T U + V - V^T": ("model.rate=psd_skew",),
    "relu": ("model.activation=relu",),
    "linear decay": ("optimiser.decay=linear",),
    "beta 0.4 instead of 0.2": ("model.beta=0.4",),
    "linear decay, beta 0.4, weight decay 0.3": WITHIN_NOISE,
    "the same and a norm for each step": WITHIN_NOISE,
    "Muon 0.02": ("optimiser.muon_lr=0.02",),
    "Muon 0.045": ("optimiser.muon_lr=0.045",),
    "Muon 0.07": ("optimiser.muon_lr=0.07",),
    "an eta for each step": (),
    "8 heads": ("model.heads=8",),
    "2 heads": ("model.heads=2",),
    "1 head": ("model.heads=1",),
    "an eta for each term": ("model.rate=free_per_term",),
    "an eta for each term, width 92": ("model.rate=free_per_term", "model.width=92"),
    "a token is its own key, exact gradient": ("model.mask=inclusive",),
    "a token is its own key, released form": ("model.mask=released",),
    "potential gelu, hidden 8D": (
        "model.feedforward=memory",
        "model.potential=gelu",
        "model.hidden_factor=8",
    ),
    "hidden 8D, width 72": ("model.hidden_factor=8", "model.width=72"),
    "RGPT-parallel": ("model.block=rgpt_parallel", "optimiser.muon_eta=false"),
    "RGPT": ("model.block=rgpt", "optimiser.muon_eta=false"),
}
OTHER_MODELS: dict[str, type[LanguageModel]] = {
    "embedding injected at every step": Injected,
    "a norm for each step": NormEachStep,
    "the same and a norm for each step": NormEachStep,
    "an eta for each step": EtaEachStep,
}


def configuration(name: str, seed: int) -> TrainConfig:
    fields = LEVERS[name]
    changed = {field.partition("=")[0] for field in fields}
    kept = [field for field in BASE if field.partition("=")[0] not in changed]
    return override(PRESETS["shakespeare_nrgpt_ff2w"](), [*kept, *fields, f"seed={seed}"])


def train(name: str, seed: int, to: str = "results.jsonl") -> None:
    cfg = configuration(name, seed)
    validation = training.batches(cfg, "val", seed=1_000)
    torch.manual_seed(seed)
    model = OTHER_MODELS.get(name, LanguageModel)(cfg.model)
    averages = {share: copy.deepcopy(model) for share in AVERAGES}

    @torch.no_grad()
    def average(updates: int) -> None:
        for share, averaged in averages.items():
            share = min(share, updates / (9 + updates))
            for ours, theirs in zip(averaged.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 1 - share)

    began = time.perf_counter()
    losses = training.train(model, cfg, training.batches(cfg, "train", seed), average)
    row = {
        "lever": name,
        "seed": seed,
        "parameters": training.learned_parameters(model),
        "train_loss": statistics.fmean(losses[-50:]),
        "val_loss": training.mean_loss(model, validation, 60),
        **{
            f"val_loss_average_{share}": training.mean_loss(averages[share], validation, 60)
            for share in AVERAGES
        },
        "seconds": round(time.perf_counter() - began),
    }
    training.add_row(HERE / to, row)


def summarise() -> None:
    rows = training.read_rows(HERE / "results.jsonl")
    groups = {name: own for (name,), own in grouped(rows, "lever").items()}
    lines = []
    for name in LEVERS:
        if name not in groups:
            continue
        own = groups[name]
        seeds = {row["seed"]: row["val_loss"] for row in own}
        base = {row["seed"]: row["val_loss"] for row in groups.get("none", [])}
        against = [loss - base[seed] for seed, loss in seeds.items() if seed in base]
        averaged = [statistics.fmean(row[f"val_loss_average_{s}"] for row in own) for s in AVERAGES]
        lines.append(
            [
                name,
                f"{own[0]['parameters']:,}",
                f"{statistics.fmean(row['train_loss'] for row in own):.3f}",
                " ".join(f"{loss:.3f}" for _, loss in sorted(seeds.items())),
                f"{statistics.fmean(against):+.3f}" if against else "-",
                *(f"{loss:.3f}" for loss in averaged),
            ]
        )
    headings = [
        "change", "parameters", "training", "validation, by seed", "mean against none",
        *(f"weights averaged, {share}" for share in AVERAGES),
    ]  # fmt: skip
    write_text(HERE / "summary.md", markdown(headings, lines))


def main(names: Annotated[list[str] | None, typer.Argument()] = None, seeds: str = "0,1") -> None:
    torch.set_num_threads(1)
    training.check_names(names or LEVERS, LEVERS)
    for seed in map(int, seeds.split(",")):
        for name in names or LEVERS:
            train(name, seed)
    summarise()


if __name__ == "__main__":
    typer.run(main)
