"""Text in GPT-2's byte pairs: the paper's OpenWebText tables."""

import dataclasses
from typing import Any

from ..config import DataConfig, OptimiserConfig, TrainConfig
from ..overrides import replace
from .models import make_model

OWT_RATES = {
    "gpt": (7e-4, 0.1),
    "rgpt": (6e-4, 2 / 3),
    "rgpt_parallel": (6e-4, 2 / 3),
    "nrgpt_ff1": (1e-4, 0.7),
    "nrgpt_ff2w": (1e-4, 0.7),
}
"""At equal width: the learning rate, and its last value as a share."""
OWT_EQUAL_PARAMETERS = {
    "gpt": ({"width": 768, "steps": 12}, 7e-4),
    "rgpt_parallel": ({"width": 1740, "steps": 6}, 6e-4),
    "nrgpt_ff2w": ({"width": 1536, "steps": 6}, 3e-5),
}
"""At equal parameters (124M to 128M, tied): sizes and learning rate."""
OURS_NRGPT = {"model.alpha_init": 4.0, "model.rate": "free_per_term", "optimiser.muon_eta": True}
"""What made up for GPT's lead: experiments/text_rates and text_steps."""
OURS_EQUAL_PARAMETERS = {"model.width": 1728, "model.steps": 12}
"""NRGPT with low-rank heads has fewer parameters than the paper's of the same width: as many as
GPT take this one (124.5M). Twice the steps: experiments/text_steps."""
LOOPED = {"model.prelude": 3, "model.prelude_loops": 3, "model.prelude_block": "parallel"}
"""A prelude of three layers, gone through three times."""


def openwebtext(kind: str, form: str, equal_parameters: bool = False) -> TrainConfig:
    """GPT-2 byte pairs, context 1,024, 100,000 iterations (480 sequences each; released: 384)."""
    sizes: dict[str, Any] = {"width": 768, "steps": 12}
    lr, final = OWT_RATES[kind]
    if equal_parameters:
        (sizes, lr), final = OWT_EQUAL_PARAMETERS[kind], 0.1
    cfg = TrainConfig(
        model=make_model(form, kind, vocab_size=50_304, context=1_024, heads=12, **sizes),
        data=DataConfig(task="text"),
        optimiser=OptimiserConfig(lr=lr, final=final, warmup=2_000),
        iterations=100_000,
        batch=384 if form == "released" else 480,
        accumulation=4 if form == "released" else 5,
        precision="bf16",
        compile=True,
        eval_every=1_000,
        eval_batches=10,
        save_every=1_000,
        log_every=10,
    )
    if form in ("paper", "released"):
        return cfg
    ours = OptimiserConfig(name="muon", lr=6e-4, muon_lr=0.02, warmup=500)
    cfg = dataclasses.replace(cfg, optimiser=ours)
    if cfg.model.block != "nrgpt":
        return cfg
    return replace(cfg, OURS_NRGPT | (OURS_EQUAL_PARAMETERS if equal_parameters else {}))
