"""The blocks of the baselines, GPT, RGPT and RGPT-parallel: transformers, without an energy."""

from abc import abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.pointwise import ACTIVATIONS
from .block import Block
from .config import ModelConfig
from .init import normal, parameter, zeros
from .norm import Norm, make_norm
from .past import Memory, Past, WholeText
from .step import Extra


class Joined(NamedTuple):
    """W_Q, W_K and W_V (if there is one) as one matrix, and their biases, if any, as one vector."""

    weight: Tensor
    bias: Tensor | None


class TransformerPlan(NamedTuple):
    block: "TransformerBlock"
    joined: Joined

    def move(
        self, x: Tensor, t: int, memory: Memory | None = None, masks: Tensor | None = None
    ) -> Tensor:
        return self.block.step(x, t, self.joined, memory, masks)

    def begin(self, x: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory | None]:
        return x, memory

    def keep(self, x: Tensor, t: int, memory: Memory) -> None:
        self.block.attention.read(self.block.attention_norm(x), self.joined, t, memory)


class TransformerBlock(Block):
    """What the baselines share with one another."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attention = Attention(cfg)
        self.feedforward = FeedForward(cfg)

    def plan(self, extra: Extra | None = None, *, stacked: bool = False) -> TransformerPlan:
        if extra:
            raise ValueError(
                f"extra terms {', '.join(extra)}: only block='nrgpt' has an energy to add to"
            )
        return TransformerPlan(self, self.attention.joined())

    @property
    @abstractmethod
    def attention_norm(self) -> Norm: ...

    @abstractmethod
    def step(
        self, x: Tensor, t: int, joined: Joined, memory: Memory | None, masks: Tensor | None
    ) -> Tensor: ...


class SequentialBlock(TransformerBlock):
    """Pre-norm GPT block: attention, then feed-forward."""

    updates = 2

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.norm_1 = make_norm(cfg, learn_gamma=cfg.learn_gamma, learn_delta=cfg.learn_delta)
        self.norm_2 = make_norm(cfg, learn_gamma=cfg.learn_gamma, learn_delta=cfg.learn_delta)

    @property
    def attention_norm(self) -> Norm:
        return self.norm_1

    def step(
        self, x: Tensor, t: int, joined: Joined, memory: Memory | None, masks: Tensor | None
    ) -> Tensor:
        x = x + dropped(self.attention(self.norm_1(x), joined, t, memory), masks, 0)
        return x + dropped(self.feedforward(self.norm_2(x)), masks, 1)


class ParallelBlock(TransformerBlock):
    """GPT-J block, paper eq. parallel-transformer: x <- x + AT(g) + FF(g), g = norm(x)."""

    updates = 1

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.norm = make_norm(cfg, learn_gamma=cfg.learn_gamma, learn_delta=cfg.learn_delta)
        self.norm_2 = None
        if cfg.separate_norms:
            self.norm_2 = make_norm(cfg, learn_gamma=cfg.learn_gamma, learn_delta=cfg.learn_delta)

    @property
    def attention_norm(self) -> Norm:
        return self.norm

    def step(
        self, x: Tensor, t: int, joined: Joined, memory: Memory | None, masks: Tensor | None
    ) -> Tensor:
        g = self.norm(x)
        g_2 = g if self.norm_2 is None else self.norm_2(x)
        return x + dropped(self.attention(g, joined, t, memory) + self.feedforward(g_2), masks, 0)


class Attention(nn.Module):
    """Causal multi-head self-attention of a GPT: B <= A, own keys, values and projection; or with
    ``values="identity"`` neither values nor projection: each head mixes its part of g."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        D = cfg.width
        self.heads = cfg.heads
        self.scale = cfg.score_scale
        self.W_Q = parameter(D, D, start=normal, muon="matrix")
        self.W_K = parameter(D, D, start=normal, muon="matrix")
        own = cfg.values == "own"
        self.W_V = parameter(D, D, start=normal, muon="matrix") if own else None
        self.W_P = parameter(D, D, start=normal, muon="matrix") if own else None
        self.b_Q = parameter(D, start=zeros) if cfg.attention_bias else None
        self.b_K = parameter(D, start=zeros) if cfg.attention_bias else None
        self.b_V = parameter(D, start=zeros) if cfg.attention_bias and own else None
        self.b_P = parameter(D, start=zeros) if cfg.bias and own else None

    def joined(self) -> Joined:
        weights: list[Tensor] = [W for W in (self.W_Q, self.W_K, self.W_V) if W is not None]
        biases: list[Tensor] = [b for b in (self.b_Q, self.b_K, self.b_V) if b is not None]
        return Joined(torch.cat(weights), torch.cat(biases) if biases else None)

    def read(self, g: Tensor, joined: Joined, t: int, memory: Memory | None) -> tuple[Tensor, Past]:
        """Queries, and what they see."""
        read = F.linear(g, *joined)
        if self.W_V is None:
            read = torch.cat([read, g.to(read.dtype)], dim=-1)
        q, k, v = read.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, WholeText(t, (k, v)) if memory is None else memory.past(t, 0, (k, v))

    def forward(self, g: Tensor, joined: Joined, t: int, memory: Memory | None) -> Tensor:
        q, past = self.read(g, joined, t, memory)
        out = past.attend(q, self.scale, strict=False)
        out = out.transpose(1, 2).flatten(-2)
        return out if self.W_P is None else F.linear(out, self.W_P, self.b_P)


class FeedForward(nn.Module):
    """W_2 sigma(W_1 g + b_1) + b_2."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.activation = cfg.activation
        self.W_1 = parameter(cfg.hidden, cfg.width, start=normal, muon="matrix")
        self.W_2 = parameter(cfg.width, cfg.hidden, start=normal, muon="matrix")
        self.b_1 = parameter(cfg.hidden, start=zeros) if cfg.bias else None
        self.b_2 = parameter(cfg.width, start=zeros) if cfg.bias else None

    def forward(self, g: Tensor) -> Tensor:
        sigma = ACTIVATIONS[self.activation].value
        return F.linear(sigma(F.linear(g, self.W_1, self.b_1)), self.W_2, self.b_2)


def dropped(update: Tensor, masks: Tensor | None, number: int) -> Tensor:
    """A block's update after dropout, if there is any."""
    return update if masks is None else update * masks[number]
