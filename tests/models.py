"""Small models with weights that leave no part at rest, for the tests to compare."""

from typing import Any

import torch
from torch import Tensor

from nrgpt import LanguageModel, ModelConfig

MASKS = ("strict", "released", "inclusive")
COUPLINGS = ("low_rank", "full")
FEEDFORWARDS: tuple[dict[str, Any], ...] = (
    {"feedforward": "ff1"},
    {"feedforward": "ff1", "activation": "relu"},
    {"feedforward": "ff2w"},
    {"feedforward": "ff2w", "activation": "relu"},
    {"feedforward": "ff2"},
    {"feedforward": "memory", "potential": "relu2"},
    {"feedforward": "memory", "potential": "gelu"},
    {"feedforward": "memory", "potential": "softplus"},
    {"feedforward": "memory", "potential": "softplus2"},
)
NORMS = ("layernorm", "rmsnorm", "none")
RATES = (
    "identity",
    "scalar",
    "gamma",
    "gamma_per_step",
    "free",
    "free_per_step",
    "free_per_term",
    "gains",
    "psd_skew",
    "psd_skew_per_step",
    "state",
)
CONE = {"feedforward": "memory", "safeguard": "cone"}
FREE = {"feedforward": "memory", "write": "free", "rate": "gains"}
SETTLED = {"past": "settled", "mask": "inclusive"}
DESCENDING: tuple[dict[str, Any], ...] = (
    SETTLED,
    {"past": "settled"},
    {"past": "settled", "coupling": "full", "prelude": 1},
    {**SETTLED, "drive": True, "feedforward": "ff1", "rate": "free_per_term"},
    {**SETTLED, "prelude": 2, "prelude_block": "parallel", "prelude_loops": 2, "bias": True},
    {**SETTLED, "prelude": 1, "start": "sphere", "drive": True, "attention_bias": True},
    {"start": "sphere"},
    {**FREE, **CONE, "prelude": 1, "prelude_loops": 2, "prelude_block": "shared"},
    CONE,
    {**CONE, "rate": "gains", "norm": "rmsnorm", "learn_alpha": False},
    {**CONE, "norm": "none", "potential": "softplus", "init_std": 0.1},
    FREE,
    {**FREE, **CONE},
    {**FREE, **CONE, **SETTLED, "rate": "scalar", "margin": 0.0},
    {**FREE, **CONE, **SETTLED, "drive": True, "prelude": 1, "start": "sphere", "norm": "rmsnorm"},
)
"""Settled pasts, write weights of their own, the cone, and what goes with them."""
BLOCKS = ("nrgpt", "gpt", "rgpt", "rgpt_parallel")


def config(**fields: Any) -> ModelConfig:
    """A model of odd sizes: width 9, 3 heads, 11 kinds of token, 13 tokens of context."""
    sizes = {"vocab_size": 11, "context": 13, "width": 9, "heads": 3, "steps": 3}
    return ModelConfig(**{**sizes, "hidden_factor": 2, **fields})


def randomised(cfg: ModelConfig, std: float = 0.3) -> LanguageModel:
    """A float64 model in which every parameter, frozen ones too, has been moved at random."""
    model = LanguageModel(cfg).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn_like(parameter))
    return model


def forces(model: LanguageModel, x: Tensor, extra: Any = None) -> dict[str, Tensor]:
    """Each term's force on g in state x."""
    return model.energy_block.plan(extra).observe(x, 0).forces


def tokens(cfg: ModelConfig, batch: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    text = torch.randint(cfg.vocab_size, (batch, length + 1))
    return text[:, :-1], text[:, 1:]


def weights(model: LanguageModel) -> dict[str, Tensor]:
    """The parameters by name, detached from the model, each a leaf that wants a gradient."""
    return {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||; infinite if anything is not finite."""
    error = ((a - b).norm() / b.norm().clamp(min=1e-300)).item()
    return error if torch.isfinite(a).all() and torch.isfinite(b).all() else float("inf")
