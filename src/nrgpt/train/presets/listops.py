"""ListOps: the paper's transitions and energy figures, the demo, and a tiny run for tests."""

import dataclasses
from typing import Any

from ...data.listops import PAPER, RELEASED, ListOpsConfig
from ...model.config import ModelConfig
from ..config import DataConfig, OptimiserConfig, TrainConfig
from ..overrides import replace
from .models import CERTIFIED, SETTLED, make_model

LISTOPS_WIDTHS = (8, 10, 13, 16, 20, 25, 32, 40, 51, 64, 81, 102, 128, 161, 203, 256)
"""The 16 widths of the paper's ListOps figure, 2^3 to 2^8 in equal ratios."""


def vocabulary(data: ListOpsConfig) -> int:
    return 4 + len(data.functions) + data.numbers


def listops(kind: str, form: str) -> TrainConfig:
    """The transition experiment at width 64, 5 steps; sweep model.width for the figure."""
    sizes = {"width": 64, "heads": 1, "steps": 5, "context": 128}
    data = PAPER if form == "paper" else RELEASED
    # The released vocabulary holds six function names, of which the data uses three.
    size = 20 if form == "released" else vocabulary(data)
    cfg = TrainConfig(
        model=make_model(form, kind, strict_mask=True, vocab_size=size, **sizes),
        data=DataConfig(task="listops", listops=data),
        optimiser=OptimiserConfig(lr=5e-4, final=0.04, decay="exponential"),
        iterations=100_000,
        batch=64,
        eval_every=2_500,
        save_every=2_500,
        log_every=100,
        graph=True,
    )
    if form in ("paper", "released"):
        return cfg
    # No expression of depth 2 is longer than 60 tokens: more positions are parameters for nothing.
    ours = OptimiserConfig(name="muon", lr=6e-3, muon_lr=0.04, decay="cosine", final=0.05)
    sizes = {"model.heads": 4, "model.context": 64}
    return replace(cfg, {**sizes, "optimiser": ours, "iterations": 12_000, "precision": "auto"})


def energy_figure(steps: int, rate: str) -> TrainConfig:
    """ListOps with many steps, whose energies the paper plots."""
    model = {"model.steps": steps, "model.rate": rate, "model.learn_gamma": rate != "identity"}
    is_deep = steps > 50  # then its steps are recomputed, which cannot be recorded
    cfg = listops("nrgpt_ff1", "paper")
    return replace(cfg, {**model, "checkpoint_steps": is_deep, "graph": not is_deep})


def energy_certified() -> TrainConfig:
    """Thirty steps whose descent is proved while the past stands still: small enough for a CPU.

    The task is the demo's (max, median, min). Steps begin at c = 0.2, since thirty of size 1 make
    x grow until nothing moves."""
    sizes: dict[str, Any] = {
        "context": 64, "width": 64, "heads": 4, "steps": 30, "hidden_factor": 4, "rate_scale": 0.2,
    }  # fmt: skip
    cfg = demo()
    model = ModelConfig(vocab_size=cfg.model.vocab_size, **{**CERTIFIED, **sizes})
    plain = {"early_exits": 0.0, "first_exit": 1}
    size = {"iterations": 1_600, "batch": 24, "eval_every": 400, "save_every": 400}
    rates = {"optimiser.lr": 6e-3, "optimiser.muon_lr": 0.03}
    return replace(cfg, {"model": model, **plain, **size, **rates})


def debug() -> TrainConfig:
    """A tiny model and tiny data: a whole run in seconds."""
    data = dataclasses.replace(RELEASED, train=2_000, validation=200, test=100)
    return TrainConfig(
        model=ModelConfig(
            vocab_size=vocabulary(data), context=32, width=16, heads=2, steps=3, dropout=0.1
        ),
        data=DataConfig(task="listops", listops=data),
        optimiser=OptimiserConfig(lr=3e-3, warmup=5),
        iterations=60,
        batch=8,
        log_every=10,
        eval_every=20,
        eval_batches=2,
        save_every=20,
    )


def demo() -> TrainConfig:
    """ListOps (max, median, min) in a few minutes on two CPU cores, with energies that fall."""
    data = dataclasses.replace(RELEASED, functions=("max", "median", "min"))
    sizes: dict[str, Any] = {
        "context": 64, "width": 64, "heads": 4, "steps": 5, "hidden_factor": 2,
    }  # fmt: skip
    return TrainConfig(
        model=ModelConfig(vocab_size=vocabulary(data), **sizes, **SETTLED),
        data=DataConfig(task="listops", listops=data),
        optimiser=OptimiserConfig(name="muon", lr=6e-3, warmup=50, final=0.05),
        early_exits=0.15,
        first_exit=2,
        iterations=1_650,
        batch=32,
        log_every=50,
        eval_every=825,
        eval_batches=4,
        save_every=550,
    )
