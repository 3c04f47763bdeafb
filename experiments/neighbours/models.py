"""The models that are compared, at two sizes.

At each size all have about as many parameters (tests/experiments/test_neighbours.py counts them),
but for gpt_flops, which has about as many FLOPs per token in training as ebt. nrgpt_flops has as
many of both. Models of the second group complete texts, 15 % of whose tokens are missing.
"""

from typing import Any

from nrgpt.train.config import TrainConfig
from nrgpt.train.overrides import replace
from nrgpt.train.presets import PRESETS

MEMORY: dict[str, Any] = {"feedforward": "memory", "hidden_factor": 8}
ET: dict[str, Any] = {"block": "et", **MEMORY, "rate": "scalar", "learn_gamma": False}

NEXT: dict[str, dict[str, Any]] = {
    "gpt": {"block": "gpt"},
    "gpt_identity": {"block": "gpt", "values": "identity"},
    "rgpt": {"block": "rgpt"},
    "rgpt_identity": {"block": "rgpt", "values": "identity"},
    "rgpt_parallel": {"block": "rgpt_parallel"},
    "nrgpt": {"block": "nrgpt", "rate": "free_per_step"},
    "nrgpt_scalar": {"block": "nrgpt", **MEMORY, "rate": "scalar", "learn_gamma": False},
    "ebt": {"block": "ebt", "rate_scale": 3.0, "steps": 2},
    "gpt_flops": {"block": "gpt"},
    "nrgpt_flops": {"block": "nrgpt", "rate": "free"},
}
"""They predict the next token. nrgpt_scalar is et without the force that tokens feel as keys."""
MASKED: dict[str, dict[str, Any]] = {
    "et": ET,
    "et_cone": {**ET, "safeguard": "cone"},
    "et_free": {**ET, "rate": "free"},
    "et_earlier": {**ET, "sight": "earlier"},
    "nrgpt_scalar_masked": {**NEXT["nrgpt_scalar"]},
    "gpt_masked": {"block": "gpt"},
}
"""They complete texts; the last two see the left side only."""
JOBS = NEXT | MASKED

Shape = dict[str, Any]
SMALL: dict[str, Shape] = {
    "gpt": {"width": 64, "steps": 2},
    "gpt_identity": {"width": 68, "steps": 2},
    "rgpt": {"width": 88, "steps": 4},
    "rgpt_identity": {"width": 96, "steps": 4},
    "rgpt_parallel": {"width": 88, "steps": 4},
    "nrgpt": {"width": 80, "steps": 4},
    "nrgpt_scalar": {"width": 96, "steps": 4},
    "ebt": {"width": 60, "layers": 2},
    "gpt_flops": {"width": 64, "steps": 9},
    "nrgpt_flops": {"width": 92, "steps": 2},
    "et": {"width": 96, "steps": 4},
    "et_free": {"width": 92, "steps": 4},
}
LARGE: dict[str, Shape] = {
    "gpt": {"width": 256, "steps": 4},
    "gpt_identity": {"width": 280, "steps": 4},
    "rgpt": {"width": 504, "steps": 8},
    "rgpt_identity": {"width": 552, "steps": 8},
    "rgpt_parallel": {"width": 504, "steps": 8},
    "nrgpt": {"width": 416, "steps": 8},
    "nrgpt_scalar": {"width": 552, "steps": 8},
    "ebt": {"width": 248, "layers": 4},
    "gpt_flops": {"width": 256, "steps": 18},
    "nrgpt_flops": {"width": 520, "steps": 2},
    "et": {"width": 552, "steps": 8},
    "et_free": {"width": 528, "steps": 8},
}
SIZES: dict[str, tuple[dict[str, Shape], dict[str, Any]]] = {
    "small": (
        SMALL,
        {
            "model.context": 64, "model.heads": 4, "iterations": 2_000, "batch": 16,
            "optimiser.warmup": 50, "eval_every": 500, "save_every": 500, "log_every": 25,
            "eval_batches": 8, "final_evaluation": False,
        },
    ),
    "large": (
        LARGE,
        {
            "model.context": 256, "model.heads": 8, "iterations": 5_000, "batch": 64,
            "optimiser.warmup": 100, "optimiser.lr": 3e-3, "optimiser.muon_lr": 0.02,
            "precision": "bf16", "eval_every": 500, "save_every": 1_000, "log_every": 50,
            "eval_batches": 20, "final_evaluation": False,
        },
    ),
}  # fmt: skip
QUICK = {
    "model.width": 16, "model.context": 16, "model.heads": 2, "iterations": 4, "batch": 4,
    "optimiser.warmup": 1, "eval_every": 4, "save_every": 4, "log_every": 2, "eval_batches": 1,
}  # fmt: skip


def config(name: str, *, size: str = "small", seed: int = 0, quick: bool = False) -> TrainConfig:
    """The training of a model by name: Shakespeare's characters, Muon and AdamW as in the preset
    shakespeare_cpu, the same for all."""
    shapes, common = SIZES[size]
    shape = shapes.get(name, shapes[name.split("_")[0]])
    if name.startswith("nrgpt_scalar"):
        shape = shapes["nrgpt_scalar"]
    fields = {f"model.{field}": value for field, value in (JOBS[name] | shape).items()}
    masked = {"objective": "masked", "model.vocab_size": 66} if name in MASKED else {}
    plain = {"model.rate": "free"}  # the preset's own is for its own model
    more = QUICK if quick else {}
    return replace(
        PRESETS["shakespeare_cpu"](), plain | common | fields | masked | more | {"seed": seed}
    )
