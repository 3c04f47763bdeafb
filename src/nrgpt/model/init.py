"""How parameters start. Each says so where it is created:

    self.W = parameter(cfg.hidden, cfg.width, start=normal, muon="matrix")

``initialise`` then goes through the whole model once. A parameter that an energy of your own
creates in another way keeps the values it was created with.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from .config import ModelConfig

Start = Callable[[Tensor, ModelConfig], None]
"""Fills a new parameter."""
Muon = Literal["matrix", "eta"]
"""Parameters that Muon updates if it is chosen: matrices that map states to states. Those of an
inference rate have a switch of their own. All others, tables and numbers, are AdamW's."""


def parameter(
    *shape: int, start: Start, muon: Muon | None = None, learn: bool = True
) -> nn.Parameter:
    """A parameter that waits for its start. NaN, so that a forgotten one cannot go unnoticed."""
    blank = nn.Parameter(torch.full(shape, float("nan")), requires_grad=learn)
    blank.start, blank.muon = start, muon  # type: ignore[attr-defined]
    return blank


@torch.no_grad()
def initialise(model: nn.Module, cfg: ModelConfig) -> dict[str, Muon]:
    """Start every parameter; returns which ones are for Muon, by name."""
    for_muon = {}
    for name, blank in model.named_parameters():
        about = vars(blank)  # emptied here: from now on it is a parameter like any other
        start: Start | None = about.pop("start", None)
        muon: Muon | None = about.pop("muon", None)
        if start is not None:
            start(blank, cfg)
        if blank.device.type != "meta" and not bool(torch.isfinite(blank).all()):
            raise ValueError(f"parameter {name!r} starts with numbers that are not finite")
        if muon is not None:
            for_muon[name] = muon
    return for_muon


def depth_scale(cfg: ModelConfig) -> float:
    """T^(-1/4) without a norm, 1 with one.

    T-Fixup and DeepNet replace normalisation by initialisation: weights and embeddings shrink
    by T^(-1/4) and updates by T^(-1/2), so that T updates leave the size of x where it was.
    """
    return cfg.steps**-0.25 if cfg.norm == "none" else 1.0


def normal(p: Tensor, cfg: ModelConfig) -> None:
    nn.init.normal_(p, std=cfg.init_std * depth_scale(cfg))


def head(p: Tensor, cfg: ModelConfig) -> None:
    nn.init.normal_(p, std=cfg.init_std)  # read once, at the end: depth has no say in it


def constant(value: float) -> Start:
    def fill(p: Tensor, cfg: ModelConfig) -> None:
        nn.init.constant_(p, value)

    return fill


def softplus_root(value: float) -> Start:
    """Where a parameter starts of which the softplus is used, so that it stays above zero."""
    return constant(value + math.log(-math.expm1(-value)))


zeros, ones = constant(0.0), constant(1.0)


def rate_size(cfg: ModelConfig) -> float:
    return cfg.rate_scale * depth_scale(cfg) ** 2


def log_rate(p: Tensor, cfg: ModelConfig) -> None:
    """log c."""
    nn.init.constant_(p, math.log(rate_size(cfg)))


def rate_vector(p: Tensor, cfg: ModelConfig) -> None:
    """The diagonals of eta."""
    nn.init.constant_(p, rate_size(cfg))


def rate_matrix(p: Tensor, cfg: ModelConfig) -> None:
    """eta: one matrix, one per step, or one per term."""
    if cfg.rate_init == "random":
        nn.init.normal_(p, std=cfg.init_std * rate_size(cfg))
    else:
        p.copy_(rate_size(cfg) * torch.eye(p.shape[-2], p.shape[-1]).expand_as(p))


def rate_root(p: Tensor, cfg: ModelConfig) -> None:
    """U of U^T U: a square root of where eta starts."""
    if cfg.rate_init == "random":
        nn.init.normal_(p, std=(cfg.init_std * rate_size(cfg) / p.shape[-2]) ** 0.5)
        return
    rows, columns = p.shape[-2:]
    for U in p.view(-1, rows, columns):
        # U^T U = c where there are rows enough, and c on average where there are not.
        nn.init.orthogonal_(U, gain=(rate_size(cfg) * max(1.0, columns / rows)) ** 0.5)


def rate_logit(p: Tensor, cfg: ModelConfig) -> None:
    """b of M(x) = diag softplus(W g + b): the inverse softplus of where M starts."""
    softplus_root(rate_size(cfg))(p, cfg)
