"""All initialisation, in one table: what a parameter is called decides how it starts.

A parameter whose name has no rule is an error, never a silent default. If your own energy term
brings a new name, give it a rule: ``nrgpt.model.init.RULES["xi"] = nrgpt.model.init.normal``.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .config import ModelConfig

Rule = Callable[[Tensor, "ModelConfig"], None]


def blank(*shape: int, learn: bool = True) -> nn.Parameter:
    """A parameter waiting for its rule. NaN, so that a forgotten one cannot go unnoticed."""
    return nn.Parameter(torch.full(shape, float("nan")), requires_grad=learn)


def depth_scale(cfg: "ModelConfig") -> float:
    """T^(-1/4) without a norm, 1 with one.

    T-Fixup and DeepNet replace normalisation by initialisation: weights and embeddings shrink
    by T^(-1/4) and updates by T^(-1/2), so that T updates leave the size of x where it was.
    """
    return cfg.steps**-0.25 if cfg.norm == "none" else 1.0


def normal(p: Tensor, cfg: "ModelConfig") -> None:
    nn.init.normal_(p, std=cfg.init_std * depth_scale(cfg))


def zeros(p: Tensor, cfg: "ModelConfig") -> None:
    nn.init.zeros_(p)


def ones(p: Tensor, cfg: "ModelConfig") -> None:
    nn.init.ones_(p)


def alpha_start(p: Tensor, cfg: "ModelConfig") -> None:
    nn.init.constant_(p, cfg.alpha_init)


def head(p: Tensor, cfg: "ModelConfig") -> None:
    nn.init.normal_(p, std=cfg.init_std)  # read once, at the end: depth has no say in it


def rate_size(cfg: "ModelConfig") -> float:
    return cfg.rate_scale * depth_scale(cfg) ** 2


def log_rate(p: Tensor, cfg: "ModelConfig") -> None:
    """log c."""
    nn.init.constant_(p, math.log(rate_size(cfg)))


def rate_matrix(p: Tensor, cfg: "ModelConfig") -> None:
    """eta: one matrix, one per step, or one per term."""
    if cfg.rate_init == "random":
        nn.init.normal_(p, std=cfg.init_std * rate_size(cfg))
    else:
        p.copy_(rate_size(cfg) * torch.eye(p.shape[-2], p.shape[-1]).expand_as(p))


def rate_root(p: Tensor, cfg: "ModelConfig") -> None:
    """U of U^T U: a square root of where eta starts."""
    if cfg.rate_init == "random":
        nn.init.normal_(p, std=(cfg.init_std * rate_size(cfg) / p.shape[-2]) ** 0.5)
        return
    rows, columns = p.shape[-2:]
    for U in p.view(-1, rows, columns):
        # U^T U = c where there are rows enough, and c on average where there are not.
        nn.init.orthogonal_(U, gain=(rate_size(cfg) * max(1.0, columns / rows)) ** 0.5)


def rate_logit(p: Tensor, cfg: "ModelConfig") -> None:
    """b of M(x) = diag softplus(W g + b): the inverse softplus of where M starts."""
    size = rate_size(cfg)
    nn.init.constant_(p, size + math.log(-math.expm1(-size)))


RULES: dict[str, Rule] = {
    # embeddings and head
    "tokens": normal,
    "positions": normal,
    "head": head,
    "head_bias": zeros,
    # energies, and the baselines' attention and feed-forward parts
    "J": normal,
    "W_Q": normal,
    "W_K": normal,
    "W_V": normal,
    "W_P": normal,
    "b_Q": zeros,
    "b_K": zeros,
    "b_V": zeros,
    "b_P": zeros,
    "W": normal,
    "W_1": normal,
    "W_2": normal,
    "b": zeros,
    "b_1": zeros,
    "b_2": zeros,
    "alpha": alpha_start,
    "feedforward_scale": ones,
    # norms
    "gamma": ones,
    "delta": zeros,
    # inference rates
    "log_c": log_rate,
    "eta": rate_matrix,
    "eta_attention": rate_matrix,
    "eta_feedforward": rate_matrix,
    "U": rate_root,
    "V": zeros,
    "W_M": zeros,
    "b_M": rate_logit,
}


@torch.no_grad()
def initialise(model: nn.Module, cfg: "ModelConfig") -> None:
    """Set every parameter by its rule; a parameter without one is an error."""
    for name, parameter in model.named_parameters():
        rule = RULES.get(name.rpartition(".")[2])
        if rule is None:
            raise ValueError(
                f"parameter {name!r} has no initialisation rule; add one to nrgpt.model.init.RULES"
            )
        rule(parameter, cfg)
