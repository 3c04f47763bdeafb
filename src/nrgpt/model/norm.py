"""g = norm(x): LayerNorm, RMSNorm or none, with the Jacobians that the descent proofs use.

With r the token's scale and u = (x - mu) / r the normalised token, g = Gamma u + delta, and

    dg/dx = (1/r) Gamma P,    P = I - u u^T / D              (RMSNorm)
                              P = I - 1 1^T / D - u u^T / D  (LayerNorm)

exactly, for every eps >= 0. At eps = 0, P has one null direction for RMSNorm, x, and two for
LayerNorm, x - mu and 1. (The paper prints I - u u^T with a u of norm sqrt(D), which is not
positive semi-definite, and misses LayerNorm's second null direction.)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .init import ones, parameter, zeros


class Norm(nn.Module, ABC):
    gamma: Tensor | None
    eps = 0.0

    def centred(self, x: Tensor) -> Tensor:
        """What of x the norm looks at."""
        return x

    @abstractmethod
    def function(self) -> Callable[[Tensor], Tensor]:
        """g as a function of x (..., D), with the weights as they are now."""

    def forward(self, x: Tensor) -> Tensor:
        return self.function()(x)

    @abstractmethod
    def scale(self, x: Tensor) -> Tensor:
        """r, shape (..., 1)."""

    @abstractmethod
    def project(self, x: Tensor, v: Tensor) -> Tensor:
        """P v: what of a move along v changes the normalised token u, up to 1/r."""

    def through(self, M: Tensor) -> Tensor:
        """What M (..., rows, D), which reads g, reads of the normalised token: M Gamma."""
        return M if self.gamma is None else M * self.gamma

    @property
    def offset(self) -> Tensor | None:
        """delta."""
        return None

    def jacobian(self, x: Tensor) -> Tensor:
        """dg/dx at each token, shape (..., D, D)."""
        D = x.shape[-1]
        eye = torch.eye(D, dtype=x.dtype, device=x.device)
        # P is symmetric, so projecting the rows of the identity gives its rows.
        P = self.project(x.unsqueeze(-2), eye.expand(*x.shape, D))
        gamma = torch.ones_like(x[..., :, None]) if self.gamma is None else self.gamma[:, None]
        return gamma * P / self.scale(x).unsqueeze(-1)


class LayerNorm(Norm):
    gamma: nn.Parameter

    def __init__(self, width: int, eps: float, learn_gamma: bool, learn_delta: bool):
        super().__init__()
        self.eps = eps
        self.gamma = parameter(width, start=ones, learn=learn_gamma)
        self.delta = parameter(width, start=zeros, learn=learn_delta)

    def function(self) -> Callable[[Tensor], Tensor]:
        shape, eps = tuple(self.gamma.shape), self.eps
        return partial(
            F.layer_norm, normalized_shape=shape, weight=self.gamma, bias=self.delta, eps=eps
        )

    def centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    def through(self, M: Tensor) -> Tensor:
        return self.centred(M * self.gamma)  # no normalised token has a mean

    @property
    def offset(self) -> Tensor:
        return self.delta

    def scale(self, x: Tensor) -> Tensor:
        return (x.var(-1, correction=0, keepdim=True) + self.eps).sqrt()

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        u = (x - x.mean(-1, keepdim=True)) / self.scale(x)
        return v - v.mean(-1, keepdim=True) - u * (u * v).mean(-1, keepdim=True)


class RMSNorm(Norm):
    gamma: nn.Parameter

    def __init__(self, width: int, eps: float, learn_gamma: bool):
        super().__init__()
        self.eps = eps
        self.gamma = parameter(width, start=ones, learn=learn_gamma)

    def function(self) -> Callable[[Tensor], Tensor]:
        shape, eps = tuple(self.gamma.shape), self.eps
        return partial(F.rms_norm, normalized_shape=shape, weight=self.gamma, eps=eps)

    def scale(self, x: Tensor) -> Tensor:
        return (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        u = x / self.scale(x)
        return v - u * (u * v).mean(-1, keepdim=True)


class NoNorm(Norm):
    """g = x. The weights then start smaller the more steps there are (see nrgpt.model.init)."""

    gamma = None

    def function(self) -> Callable[[Tensor], Tensor]:
        return lambda x: x

    def scale(self, x: Tensor) -> Tensor:
        return torch.ones_like(x[..., :1])

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return v


def make_norm(cfg: ModelConfig, *, learn_gamma: bool = True, learn_delta: bool = True) -> Norm:
    if cfg.norm == "layernorm":
        return LayerNorm(cfg.width, cfg.norm_eps, learn_gamma, learn_delta)
    if cfg.norm == "rmsnorm":
        return RMSNorm(cfg.width, cfg.norm_eps, learn_gamma)
    return NoNorm()
