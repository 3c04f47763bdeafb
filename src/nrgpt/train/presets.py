"""The experiments of the paper, and our own recipes, as functions that make a TrainConfig.

Names are ``<task>_<model>`` for our recipe, with ``_paper`` behind it for what the paper's text
says and ``_released`` for what its authors' code does. ``nrgpt presets`` lists them all.
"""

import dataclasses
import functools
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
    "nrgpt_ff2": {"block": "nrgpt", "feedforward": "ff2"},
    "gpt": {"block": "gpt"},
    "rgpt": {"block": "rgpt"},
    "rgpt_parallel": {"block": "rgpt_parallel"},
}
CERTIFIED: dict[str, Any] = {
    "block": "nrgpt",
    "feedforward": "memory",
    "potential": "relu2",
    "hidden_factor": 8,
    "rate": "gamma_per_step",
    "learn_alpha": False,
    "alpha_init": 1.0,
}
"""Whatever the weights become, no step raises an energy while the past stands still, which in the
forward pass it does not (hidden 8 D: as many parameters in the feed-forward part as the others)."""
SETTLED: dict[str, Any] = {
    "block": "nrgpt",
    "norm": "rmsnorm",
    "past": "settled",
    "mask": "inclusive",
    "prelude": 1,
    "start": "sphere",
    "drive": True,
    "write": "free",
    "feedforward": "memory",
    "potential": "relu2",
    "safeguard": "cone",
    "rate": "gains",
}
"""Whatever the weights become, no step of the forward pass raises an energy: keys and values are
made once, by the prelude, and each token then moves in their field, by write weights of its own
that the cone holds back. Read early now and then (early_exits), it also arrives: more steps than
trained do next to no harm (experiments/descent)."""
RELEASED_KINDS = {
    "nrgpt_ff1": "NRGPT_H_FF1",
    "nrgpt_ff2w": "NRGPT_H_FF2W",
    "nrgpt_ff2": "NRGPT_H_FF2",
    "gpt": "GPT",
    "rgpt": "GPT_Rec",
    "rgpt_parallel": "GPT_Rec_parallel",
}

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
"""Named grids for ``nrgpt sweep``: the paper's."""


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


# OpenWebText -------------------------------------------------------------------------------------

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


def certified(make: Callable[[str, str], TrainConfig]) -> TrainConfig:
    """Our recipe for NRGPT-FF2W, with energies and a rate whose descent is proved at every step."""
    model = {f"model.{name}": value for name, value in CERTIFIED.items()}
    return replace(make("nrgpt_ff2w", ""), {**model, "optimiser.muon_eta": False})


def settled(
    make: Callable[[str, str], TrainConfig], early: tuple[float, int], fields: dict[str, Any]
) -> TrainConfig:
    """Our recipe, with a settled past and the cone. ``early``: the share of tokens that are read
    early, and after how many steps at least."""
    model = {f"model.{name}": value for name, value in SETTLED.items()}
    off = {"optimiser.muon_eta": False, "model.alpha_init": 1.0}
    exits = dict(zip(("early_exits", "first_exit"), early, strict=True))
    return replace(make("nrgpt_ff2w", ""), {**model, **off, **exits, **fields})


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


LOOPED = {"model.prelude": 3, "model.prelude_loops": 3, "model.prelude_block": "parallel"}
"""A prelude of three layers, gone through three times."""


RECIPES: dict[str, tuple[Any, ...]] = {
    "debug": (debug,),
    "demo": (demo,),
    "energy_30_steps_paper": (energy_figure, 30, "identity"),
    "energy_100_steps_paper": (energy_figure, 100, "free"),
    "energy_30_steps_certified": (energy_certified,),
    "listops_nrgpt_certified": (certified, listops),
    "listops_nrgpt_settled": (settled, listops, (0.15, 2), {"model.hidden_factor": 2}),
    "listops_nrgpt_ff1": (listops, "nrgpt_ff1", ""),
    "listops_nrgpt_ff1_paper": (listops, "nrgpt_ff1", "paper"),
    "listops_nrgpt_ff1_released": (listops, "nrgpt_ff1", "released"),
    "listops_nrgpt_ff2w": (listops, "nrgpt_ff2w", ""),
    "listops_nrgpt_ff2w_paper": (listops, "nrgpt_ff2w", "paper"),
    "listops_nrgpt_ff2w_released": (listops, "nrgpt_ff2w", "released"),
    "listops_nrgpt_ff2": (listops, "nrgpt_ff2", ""),
    "listops_nrgpt_ff2_paper": (listops, "nrgpt_ff2", "paper"),
    "listops_nrgpt_ff2_released": (listops, "nrgpt_ff2", "released"),
    "listops_gpt": (listops, "gpt", ""),
    "listops_gpt_paper": (listops, "gpt", "paper"),
    "listops_gpt_released": (listops, "gpt", "released"),
    "listops_rgpt": (listops, "rgpt", ""),
    "listops_rgpt_paper": (listops, "rgpt", "paper"),
    "listops_rgpt_released": (listops, "rgpt", "released"),
    "listops_rgpt_parallel": (listops, "rgpt_parallel", ""),
    "listops_rgpt_parallel_paper": (listops, "rgpt_parallel", "paper"),
    "listops_rgpt_parallel_released": (listops, "rgpt_parallel", "released"),
    "shakespeare_cpu": (shakespeare_cpu, 5),
    "shakespeare_nrgpt_certified": (certified, shakespeare),
    "shakespeare_nrgpt_settled": (settled, shakespeare, (0.15, 3), {"model.width": 80}),
    "shakespeare_nrgpt_ff1": (shakespeare, "nrgpt_ff1", ""),
    "shakespeare_nrgpt_ff1_paper": (shakespeare, "nrgpt_ff1", "paper"),
    "shakespeare_nrgpt_ff1_released": (shakespeare, "nrgpt_ff1", "released"),
    "shakespeare_nrgpt_ff2w": (shakespeare, "nrgpt_ff2w", ""),
    "shakespeare_nrgpt_ff2w_paper": (shakespeare, "nrgpt_ff2w", "paper"),
    "shakespeare_nrgpt_ff2w_released": (shakespeare, "nrgpt_ff2w", "released"),
    "shakespeare_et": (neighbour, "et"),
    "shakespeare_ebt": (neighbour, "ebt"),
    "shakespeare_gpt": (shakespeare, "gpt", ""),
    "shakespeare_gpt_paper": (shakespeare, "gpt", "paper"),
    "shakespeare_gpt_released": (shakespeare, "gpt", "released"),
    "shakespeare_rgpt": (shakespeare, "rgpt", ""),
    "shakespeare_rgpt_paper": (shakespeare, "rgpt", "paper"),
    "shakespeare_rgpt_released": (shakespeare, "rgpt", "released"),
    "shakespeare_rgpt_parallel": (shakespeare, "rgpt_parallel", ""),
    "shakespeare_rgpt_parallel_paper": (shakespeare, "rgpt_parallel", "paper"),
    "shakespeare_rgpt_parallel_released": (shakespeare, "rgpt_parallel", "released"),
    "owt_nrgpt_certified": (certified, openwebtext),
    "owt_nrgpt_settled": (settled, openwebtext, (0.15, 3), {**LOOPED, "optimiser.lr": 3e-3}),
    "owt_nrgpt_ff1": (openwebtext, "nrgpt_ff1", ""),
    "owt_nrgpt_ff1_paper": (openwebtext, "nrgpt_ff1", "paper"),
    "owt_nrgpt_ff1_released": (openwebtext, "nrgpt_ff1", "released"),
    "owt_nrgpt_ff2w": (openwebtext, "nrgpt_ff2w", ""),
    "owt_nrgpt_ff2w_paper": (openwebtext, "nrgpt_ff2w", "paper"),
    "owt_nrgpt_ff2w_released": (openwebtext, "nrgpt_ff2w", "released"),
    "owt_gpt": (openwebtext, "gpt", ""),
    "owt_gpt_paper": (openwebtext, "gpt", "paper"),
    "owt_gpt_released": (openwebtext, "gpt", "released"),
    "owt_rgpt": (openwebtext, "rgpt", ""),
    "owt_rgpt_paper": (openwebtext, "rgpt", "paper"),
    "owt_rgpt_released": (openwebtext, "rgpt", "released"),
    "owt_rgpt_parallel": (openwebtext, "rgpt_parallel", ""),
    "owt_rgpt_parallel_paper": (openwebtext, "rgpt_parallel", "paper"),
    "owt_rgpt_parallel_released": (openwebtext, "rgpt_parallel", "released"),
    "owt_nrgpt_ff2w_equal_parameters": (openwebtext, "nrgpt_ff2w", "", True),
    "owt_nrgpt_ff2w_equal_parameters_paper": (openwebtext, "nrgpt_ff2w", "paper", True),
    "owt_nrgpt_ff2w_equal_parameters_released": (openwebtext, "nrgpt_ff2w", "released", True),
    "owt_gpt_equal_parameters": (openwebtext, "gpt", "", True),
    "owt_gpt_equal_parameters_paper": (openwebtext, "gpt", "paper", True),
    "owt_gpt_equal_parameters_released": (openwebtext, "gpt", "released", True),
    "owt_rgpt_parallel_equal_parameters": (openwebtext, "rgpt_parallel", "", True),
    "owt_rgpt_parallel_equal_parameters_paper": (openwebtext, "rgpt_parallel", "paper", True),
    "owt_rgpt_parallel_equal_parameters_released": (openwebtext, "rgpt_parallel", "released", True),
}
PRESETS: dict[str, Callable[[], TrainConfig]] = {
    name: functools.update_wrapper(functools.partial(make, *arguments), make)
    for name, (make, *arguments) in RECIPES.items()
}
