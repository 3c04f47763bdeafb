"""The blocks of the baselines, GPT, RGPT and RGPT-parallel: transformers, without an energy.

What every block has is said in nrgpt.model.block.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..decode.cache import Cache
from ..kernels.attention import causal_attention
from ..kernels.pointwise import ACTIVATIONS
from .config import ModelConfig
from .energy.total import Extra
from .init import blank
from .norm import make_norm


def dropped(update: Tensor, masks: Tensor | None, number: int = 0) -> Tensor:
    """A block's update after dropout, if there is any."""
    return update if masks is None else update * masks[number]


class Joined(NamedTuple):
    """W_Q, W_K and W_V as one matrix, and their biases, if any, as one vector."""

    weight: Tensor
    bias: Tensor | None


class TransformerBlock(nn.Module):
    """What the baselines share with one another, and nothing with an energy."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attention = Attention(cfg)
        self.feedforward = FeedForward(cfg)

    def prepare(self, extra: Extra | None = None) -> Joined:
        if extra:
            raise ValueError(
                f"extra terms {', '.join(extra)}: only block='nrgpt' has an energy to add to"
            )
        return self.attention.joined()


class SequentialBlock(TransformerBlock):
    """Pre-norm GPT block: attention, then feed-forward."""

    updates = 2

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.norm_1 = make_norm(cfg, learn_gamma=cfg.learn_gamma, learn_delta=cfg.learn_delta)
        self.norm_2 = make_norm(cfg, learn_gamma=cfg.learn_gamma, learn_delta=cfg.learn_delta)

    def forward(
        self,
        x: Tensor,
        t: int,
        prepared: Joined,
        masks: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x = x + dropped(self.attention(self.norm_1(x), prepared, t, cache), masks, 0)
        return x + dropped(self.feedforward(self.norm_2(x)), masks, 1)

    def keep(self, x: Tensor, t: int, prepared: Joined, cache: Cache) -> None:
        self.attention.read(self.norm_1(x), prepared, t, cache)


class ParallelBlock(TransformerBlock):
    """GPT-J block, paper eq. parallel-transformer: x <- x + AT(g) + FF(g), g = norm(x)."""

    updates = 1

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.norm = make_norm(cfg, learn_gamma=cfg.learn_gamma, learn_delta=cfg.learn_delta)
        self.norm_2 = None
        if cfg.separate_norms:
            self.norm_2 = make_norm(cfg, learn_gamma=cfg.learn_gamma, learn_delta=cfg.learn_delta)

    def forward(
        self,
        x: Tensor,
        t: int,
        prepared: Joined,
        masks: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        g = self.norm(x)
        g_2 = g if self.norm_2 is None else self.norm_2(x)
        return x + dropped(self.attention(g, prepared, t, cache) + self.feedforward(g_2), masks)

    def keep(self, x: Tensor, t: int, prepared: Joined, cache: Cache) -> None:
        self.attention.read(self.norm(x), prepared, t, cache)


class Attention(nn.Module):
    """Causal multi-head self-attention of a GPT: B <= A, own keys, values and projection."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.heads = cfg.heads
        self.scale = cfg.score_scale
        self.W_Q = blank(cfg.width, cfg.width)
        self.W_K = blank(cfg.width, cfg.width)
        self.W_V = blank(cfg.width, cfg.width)
        self.W_P = blank(cfg.width, cfg.width)
        self.b_Q = blank(cfg.width) if cfg.attention_bias else None
        self.b_K = blank(cfg.width) if cfg.attention_bias else None
        self.b_V = blank(cfg.width) if cfg.attention_bias else None
        self.b_P = blank(cfg.width) if cfg.bias else None

    def joined(self) -> Joined:
        weight = torch.cat([self.W_Q, self.W_K, self.W_V])
        if self.b_Q is None or self.b_K is None or self.b_V is None:
            return Joined(weight, None)
        return Joined(weight, torch.cat([self.b_Q, self.b_K, self.b_V]))

    def read(
        self, g: Tensor, joined: Joined, t: int, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and the keys and values that the cache now holds, or the tokens' own."""
        q, k, v = F.linear(g, *joined).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if cache is None:
            return q, k, v
        kept = cache.put(t, 0, k), cache.put(t, 1, v)
        return (q, k, v) if cache.is_empty else (q, *kept)

    def forward(self, g: Tensor, joined: Joined, t: int, cache: Cache | None) -> Tensor:
        q, k, v = self.read(g, joined, t, cache)
        if cache is None or cache.is_empty:
            out = causal_attention(q, k, v, self.scale)
        else:
            assert cache.seen is not None
            (k, mask), (v, _) = (cache.seen.window(kept, strict=False) for kept in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return F.linear(out.transpose(1, 2).flatten(-2), self.W_P, self.b_P)


class FeedForward(nn.Module):
    """W_2 sigma(W_1 g + b_1) + b_2."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.sigma = ACTIVATIONS[cfg.activation].value
        self.W_1 = blank(cfg.hidden, cfg.width)
        self.W_2 = blank(cfg.width, cfg.hidden)
        self.b_1 = blank(cfg.hidden) if cfg.bias else None
        self.b_2 = blank(cfg.width) if cfg.bias else None

    def forward(self, g: Tensor) -> Tensor:
        return F.linear(self.sigma(F.linear(g, self.W_1, self.b_1)), self.W_2, self.b_2)
