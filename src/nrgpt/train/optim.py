"""Optimisers and the learning-rate schedule."""

import math
from typing import Any

import torch
from torch.optim import Optimizer

from ..model.network import Network
from .config import OptimiserConfig


class MUON:
    """The default settings of torch.optim.Muon, which packed_optim.py needs to know."""

    momentum = 0.95
    coefficients = (3.4445, -4.7750, 2.0315)
    iterations = 5
    eps = 1e-7
    state = ("momentum_buffer",)


def make_optimisers(model: Network, cfg: OptimiserConfig, device: torch.device) -> list[Optimizer]:
    """AdamW, preceded by Muon if asked. ``peak`` of a group is its largest learning rate."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimisers: list[Optimizer] = []
    by_muon = names_for_muon(model, cfg)
    if cfg.name == "muon":
        matrices = [learned[name] for name in sorted(by_muon)]
        groups = [{"params": matrices, "peak": cfg.muon_lr}]
        optimisers.append(torch.optim.Muon(groups, lr=cfg.muon_lr, weight_decay=cfg.weight_decay))
    rest = {name: p for name, p in learned.items() if name not in by_muon}
    decayed = [p for p in rest.values() if p.dim() >= 2]
    plain = [p for p in rest.values() if p.dim() < 2]
    groups = [
        {"params": params, "weight_decay": decay, "peak": cfg.lr}
        for params, decay in ((decayed, cfg.weight_decay), (plain, 0.0))
        if params
    ]
    options: dict[str, Any] = {"betas": (cfg.beta1, cfg.beta2), "fused": device.type == "cuda"}
    return [*optimisers, torch.optim.AdamW(groups, lr=cfg.lr, **options)]


def names_for_muon(model: Network, cfg: OptimiserConfig) -> list[str]:
    """The parameters that Muon updates: the model's matrices, and eta if asked."""
    if cfg.name != "muon":
        return []
    kinds = {"matrix", "eta"} if cfg.muon_eta else {"matrix"}
    learned = {name for name, p in model.named_parameters() if p.requires_grad}
    return [name for name, kind in model.for_muon.items() if kind in kinds and name in learned]


def rate_at(step: int, iterations: int, cfg: OptimiserConfig) -> float:
    """The learning rate at an iteration, as a share of its largest."""
    if step < cfg.warmup:
        return (step + 1) / cfg.warmup
    progress = min(1.0, (step - cfg.warmup) / max(1, iterations - 1 - cfg.warmup))
    match cfg.decay:
        case "cosine":
            return cfg.final + (1 - cfg.final) * 0.5 * (1 + math.cos(math.pi * progress))
        case "exponential":
            return cfg.final**progress
        case "linear":
            return 1 + (cfg.final - 1) * progress
        case "constant":
            return 1.0


def set_rate(optimisers: list[Optimizer], share: float) -> None:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = share * group["peak"]
