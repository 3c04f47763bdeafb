"""Optimisers and the learning-rate schedule."""

import math

import torch
from torch.optim import Optimizer

from ..model.network import Network
from .config import OptimiserConfig


class MUON:
    """The settings of torch.optim.Muon that we leave as they are; packed_optim.py needs them."""

    momentum = 0.95
    coefficients = (3.4445, -4.7750, 2.0315)
    iterations = 5
    eps = 1e-7
    state = ("momentum_buffer",)


def make_optimisers(model: Network, cfg: OptimiserConfig, device: torch.device) -> list[Optimizer]:
    """AdamW, and Muon before it if asked. Each group remembers its largest rate as ``peak``."""
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
        {"params": decayed, "weight_decay": cfg.weight_decay, "peak": cfg.lr},
        {"params": plain, "weight_decay": 0.0, "peak": cfg.lr},
    ]
    optimisers.append(
        torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=cfg.lr,
            betas=(cfg.beta1, cfg.beta2),
            fused=device.type == "cuda",
        )
    )
    return optimisers


def names_for_muon(model: Network, cfg: OptimiserConfig) -> list[str]:
    """The parameters that Muon updates: those that were created for it, eta only if asked."""
    kinds = {"matrix", "eta"} if cfg.muon_eta else {"matrix"}
    learned = {name for name, p in model.named_parameters() if p.requires_grad}
    is_used = cfg.name == "muon"
    return [n for n, kind in model.for_muon.items() if is_used and kind in kinds and n in learned]


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
