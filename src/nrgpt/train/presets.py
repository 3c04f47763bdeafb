"""The experiments of the paper, and our own recipes, as functions that make a TrainConfig.

``<task>_<model>`` is our recipe. ``<task>_<model>_paper`` follows the paper's text, and
``<task>_<model>_released`` the code that its authors released. ``nrgpt presets`` lists them all.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

from ..data.listops import PAPER, RELEASED, ListOpsConfig
from ..interop.released import released_config
from ..model.config import ModelConfig
from .config import DataConfig, OptimiserConfig, TrainConfig
from .overrides import replace

MODELS: dict[str, dict[str, Any]] = {
    "nrgpt_ff1": {"block": "nrgpt", "feedforward": "ff1"},
    "nrgpt_ff2w": {"block": "nrgpt", "feedforward": "ff2w"},
    "gpt": {"block": "gpt"},
    "rgpt": {"block": "rgpt"},
    "rgpt_parallel": {"block": "rgpt_parallel"},
}
CERTIFIED: dict[str, Any] = {
    "block": "nrgpt", "feedforward": "memory", "potential": "relu2", "hidden_factor": 8,
    "rate": "gamma_per_step", "learn_alpha": False, "alpha_init": 1.0,
}  # fmt: skip
"""The energy provably falls at every step, for any weights. (With a hidden size of 8 D, its
feed-forward part has as many parameters as the others'.)"""
RELEASED_KINDS = {
    "nrgpt_ff1": "NRGPT_H_FF1",
    "nrgpt_ff2w": "NRGPT_H_FF2W",
    "gpt": "GPT",
    "rgpt": "GPT_Rec",
    "rgpt_parallel": "GPT_Rec_parallel",
}

SCHEDULES: dict[str, dict[str, Any]] = {
    "listops": {
        "iterations": 100_000, "batch": 64, "graph": True,
        "log_every": 100, "eval_every": 2_500, "save_every": 2_500,
    },
    "shakespeare": {
        "iterations": 40_000, "batch": 64, "graph": True, "precision": "auto",
        "log_every": 50, "eval_every": 500, "save_every": 1_000,
    },
    "owt": {
        "iterations": 100_000, "compile": True, "precision": "bf16",
        "log_every": 10, "eval_every": 1_000, "eval_batches": 10, "save_every": 1_000,
    },
    "debug": {
        "iterations": 60, "batch": 8,
        "log_every": 10, "eval_every": 20, "eval_batches": 2, "save_every": 20,
    },
    "demo": {
        "iterations": 2_200, "batch": 32,
        "log_every": 50, "eval_every": 1_100, "eval_batches": 4, "save_every": 550,
    },
}  # fmt: skip

LISTOPS_WIDTHS = (8, 10, 13, 16, 20, 25, 32, 40, 51, 64, 81, 102, 128, 161, 203, 256)
"""The 16 widths of the paper's ListOps figure, 2^3 to 2^8 in equal ratios."""

GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "listops_widths": {"model.width": LISTOPS_WIDTHS},
    "shakespeare": {
        "model.width": (32, 64, 128, 256, 380, 512, 768),
        "model.heads": (1, 2, 8),
        "model.steps": (3, 6, 8),
        "optimiser.lr": (1e-3, 7.5e-4, 3e-4, 1e-4),
        "optimiser.decay": ("cosine", "exponential"),
        "optimiser.final": (0.1, 0.05, 0.01),
    },
}
"""The paper's grids, by the name that ``nrgpt sweep --grid`` takes."""


def paper_model(kind: str, **fields: Any) -> ModelConfig:
    """As in the paper's experiments: full-rank J, strict mask, beta, alpha, tied embedding."""
    return ModelConfig(coupling="full", **{**MODELS[kind], **fields})


def make_model(form: str, kind: str, *, strict_mask: bool = False, **sizes: Any) -> ModelConfig:
    match form:
        case "paper":
            return paper_model(kind, **sizes)
        case "released":
            dropout = sizes.pop("dropout", 0.0)
            cfg = released_config(RELEASED_KINDS[kind], strict_mask=strict_mask, **sizes)
            return dataclasses.replace(cfg, dropout=dropout)
    return ModelConfig(**{**MODELS[kind], **sizes})


# ListOps -----------------------------------------------------------------------------------------


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
        **SCHEDULES["listops"],
    )
    if form:
        return cfg
    # No expression of depth 2 has more than 60 tokens, so further positions would never be used.
    ours = OptimiserConfig(name="muon", lr=6e-3, muon_lr=0.04, decay="cosine", final=0.05)
    sizes = {"model.heads": 4, "model.context": 64}
    return replace(cfg, {**sizes, "optimiser": ours, "iterations": 12_000, "precision": "auto"})


def energy_figure(steps: int, rate: str) -> TrainConfig:
    """ListOps with many inference steps: the paper plots the energies of these models."""
    model = {"model.steps": steps, "model.rate": rate, "model.learn_gamma": rate != "identity"}
    is_deep = steps > 50  # recomputes its steps to save memory, which a CUDA graph cannot do
    cfg = listops("nrgpt_ff1", "paper")
    return replace(cfg, {**model, "checkpoint_steps": is_deep, "graph": not is_deep})


# Shakespeare -------------------------------------------------------------------------------------

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
        **SCHEDULES["shakespeare"],
    )
    if form:
        return cfg
    ours = OptimiserConfig(name="muon", lr=2e-3, muon_lr=0.02, final=0.02)
    model = {"model.heads": 4, "model.dropout": 0.05}
    return replace(cfg, {**model, "optimiser": ours, "iterations": 8_000, "eval_every": 250})


# OpenWebText -------------------------------------------------------------------------------------

OWT_RATES = {
    "gpt": (7e-4, 0.1),
    "rgpt": (6e-4, 2 / 3),
    "rgpt_parallel": (6e-4, 2 / 3),
    "nrgpt_ff1": (1e-4, 0.7),
    "nrgpt_ff2w": (1e-4, 0.7),
}
"""At equal width: the learning rate, and the share of it that is left at the end."""
OWT_EQUAL_PARAMETERS = {
    "nrgpt_ff2w": ({"width": 1536, "steps": 6}, 3e-5),
    "gpt": ({"width": 768, "steps": 12}, 7e-4),
    "rgpt_parallel": ({"width": 1740, "steps": 6}, 6e-4),
}
"""At equal parameters (124M to 128M, tied): sizes and learning rate."""
OURS_NRGPT = {"model.alpha_init": 4.0, "model.rate": "free_per_term", "optimiser.muon_eta": True}
"""With these, NRGPT catches up with GPT: experiments/text_rates and text_steps."""
OURS_EQUAL_PARAMETERS = {"model.width": 1728, "model.steps": 12}
"""Low-rank heads have fewer parameters than the paper's heads, so NRGPT needs this width to have as
many as GPT (124.5M). It also has twice the paper's steps: see experiments/text_steps."""


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
        batch=384 if form == "released" else 480,
        accumulation=4 if form == "released" else 5,
        **SCHEDULES["owt"],
    )
    if form:
        return cfg
    ours = OptimiserConfig(name="muon", lr=6e-4, muon_lr=0.02, warmup=500)
    cfg = dataclasses.replace(cfg, optimiser=ours)
    if cfg.model.block != "nrgpt":
        return cfg
    return replace(cfg, OURS_NRGPT | (OURS_EQUAL_PARAMETERS if equal_parameters else {}))


def debug() -> TrainConfig:
    """A tiny model and tiny data: a whole run in seconds."""
    data = dataclasses.replace(RELEASED, train=2_000, validation=200, test=100)
    return TrainConfig(
        model=ModelConfig(
            vocab_size=vocabulary(data), context=32, width=16, heads=2, steps=3, dropout=0.1
        ),
        data=DataConfig(task="listops", listops=data),
        optimiser=OptimiserConfig(lr=3e-3, warmup=5),
        **SCHEDULES["debug"],
    )


def demo() -> TrainConfig:
    """ListOps (max, median, min) in a few minutes on two CPU cores."""
    data = dataclasses.replace(RELEASED, functions=("max", "median", "min"))
    sizes: dict[str, Any] = {"context": 64, "width": 64, "heads": 4, "steps": 5}
    return TrainConfig(
        model=ModelConfig(
            vocab_size=vocabulary(data), hidden_factor=2, rate="free_per_step", **sizes
        ),
        data=DataConfig(task="listops", listops=data),
        optimiser=OptimiserConfig(name="muon", lr=6e-3, warmup=50, final=0.05),
        **SCHEDULES["demo"],
    )


def certified(make: Callable[[str, str], TrainConfig]) -> TrainConfig:
    """Our recipe for NRGPT-FF2W, with an energy that provably falls at every step."""
    model = {f"model.{name}": value for name, value in CERTIFIED.items()}
    return replace(make("nrgpt_ff2w", ""), {**model, "optimiser.muon_eta": False})


FORMS = {"": "", "_paper": "paper", "_released": "released"}
TASKS = {"listops": listops, "shakespeare": shakespeare, "owt": openwebtext}

RECIPES: dict[str, tuple[Any, ...]] = {
    "debug": (debug,),
    "demo": (demo,),
    "energy_30_steps_paper": (energy_figure, 30, "identity"),
    "energy_100_steps_paper": (energy_figure, 100, "free"),
}
"""A function and its arguments, by name of the preset."""
for task, make in TASKS.items():
    RECIPES[f"{task}_nrgpt_certified"] = (certified, make)
    for kind, suffix in itertools.product(MODELS, FORMS):
        RECIPES[f"{task}_{kind}{suffix}"] = (make, kind, FORMS[suffix])
for kind, suffix in itertools.product(OWT_EQUAL_PARAMETERS, FORMS):
    name = f"owt_{kind}_equal_parameters{suffix}"
    RECIPES[name] = (openwebtext, kind, FORMS[suffix], True)

PRESETS: dict[str, Callable[[], TrainConfig]] = {
    name: functools.update_wrapper(functools.partial(make, *arguments), make)
    for name, (make, *arguments) in RECIPES.items()
}
