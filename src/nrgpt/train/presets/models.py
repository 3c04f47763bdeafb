"""What the presets' models are, whatever they are trained on."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ...interop.released import released_config
from ...model.config import ModelConfig
from ..config import TrainConfig
from ..overrides import replace

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
