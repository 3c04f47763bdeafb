"""Shakespeare's characters: the paper's table, a model for a CPU, and NRGPT's neighbours."""

from typing import Any

from ...model.config import ModelConfig
from ..config import DataConfig, OptimiserConfig, TrainConfig
from ..overrides import replace
from .models import make_model

SHAKESPEARE_ROWS: dict[str, tuple[dict[str, Any], float]] = {
    "gpt": ({"width": 64, "heads": 4, "steps": 8}, 5e-3),
    "rgpt": ({"width": 256, "heads": 1, "steps": 8}, 1e-3),
    "rgpt_parallel": ({"width": 128, "heads": 1, "steps": 8}, 2e-3),
    "nrgpt_ff1": ({"width": 512, "heads": 2, "steps": 6}, 3e-4),
    "nrgpt_ff2w": ({"width": 128, "heads": 1, "steps": 8}, 1e-3),
}
"""The paper's table of best configurations: sizes and learning rate."""


def shakespeare(kind: str, form: str) -> TrainConfig:
    """The best configuration of the paper's table (our recipe: 4 heads, Muon)."""
    sizes, lr = SHAKESPEARE_ROWS[kind]
    cfg = TrainConfig(
        model=make_model(form, kind, vocab_size=65, context=256, dropout=0.1, **sizes),
        data=DataConfig(task="shakespeare"),
        optimiser=OptimiserConfig(lr=lr),
        iterations=40_000,
        batch=64,
        precision="auto",
        eval_every=500,
        save_every=1_000,
        log_every=50,
        graph=True,
    )
    if form in ("paper", "released"):
        return cfg
    ours = OptimiserConfig(name="muon", lr=2e-3, muon_lr=0.02, final=0.02)
    model = {"model.heads": 4, "model.dropout": 0.05}
    return replace(cfg, {**model, "optimiser": ours, "iterations": 8_000, "eval_every": 250})


def shakespeare_cpu(minutes: int) -> TrainConfig:
    """Shakespeare on two CPU cores in about 5 minutes: it learns words and names."""
    return TrainConfig(
        model=ModelConfig(
            vocab_size=65, context=96, width=96, heads=4, steps=4, rate="free_per_step"
        ),
        data=DataConfig(task="shakespeare"),
        optimiser=OptimiserConfig(name="muon", lr=4e-3, muon_lr=0.03, warmup=50, final=0.05),
        iterations=300 * minutes,
        batch=24,
        eval_every=250,
        eval_batches=8,
        save_every=250,
        log_every=25,
    )


NEIGHBOURS: dict[str, dict[str, Any]] = {
    "et": {
        "model.block": "et",
        "model.vocab_size": 66,  # one stands where a token is missing
        "model.feedforward": "memory",
        "model.hidden_factor": 8,
        "model.rate": "scalar",
        "model.learn_gamma": False,
        "objective": "masked",
    },
    "ebt": {
        "model.block": "ebt",
        "model.layers": 2,
        "model.width": 60,
        "model.steps": 2,
        "model.rate_scale": 3.0,
        "model.dropout": 0.0,
    },
}


def neighbour(kind: str) -> TrainConfig:
    """An Energy Transformer, which completes texts, or an Energy-Based Transformer
    (docs/neighbours.md)."""
    plain = {"model.alpha_init": 1.0, "optimiser.muon_eta": False, "graph": False}
    return replace(shakespeare("nrgpt_ff2w", ""), plain | NEIGHBOURS[kind])
