"""The same models with autograd inside the forward pass, to compare with."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..language_model import LanguageModel
from ..model.block import EnergyBlock
from ..model.config import ModelConfig
from ..model.energy import AttentionEnergy, EnergyTerm, Readout
from ..model.energy.feedforward import FF2W
from ..model.rate import Free
from ..model.step import Extra


class TextbookBlock(EnergyBlock):
    """x <- x - eta dE/dg, with E as in the paper, by torch.func.grad."""

    def plan(
        self, extra: Extra | None = None, *, stacked: bool = False, is_free: bool = False
    ) -> Any:
        return self

    def begin(self, x: Tensor, memory: None = None) -> tuple[Tensor, None]:
        return x, memory

    def move(self, x: Tensor, t: int, memory: None = None, masks: Tensor | None = None) -> Tensor:
        attention, feedforward = self.terms["attention"], self.terms["feedforward"]
        assert isinstance(attention, AttentionEnergy)
        assert isinstance(feedforward, FF2W)
        assert isinstance(self.rate, Free)
        assert attention.alpha is not None
        alpha, beta, heads = attention.alpha, attention.beta, attention.heads
        W_Q = attention.W_Q.unflatten(0, (heads, -1))
        W_K = attention.W_K.unflatten(0, (heads, -1))
        unseen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu()

        def energy(g: Tensor, past: Tensor) -> Tensor:
            q = torch.einsum("bad,hyd->bhay", g, W_Q)
            k = torch.einsum("bnd,hyd->bhny", past, W_K)
            scores = beta * torch.einsum("bhay,bhny->bhan", q, k)
            log_sum = scores.masked_fill(unseen, -1e9).logsumexp(-1)[:, :, 1:]
            hidden = F.gelu(g @ feedforward.W_1.T)
            E_AT = -(alpha[:, None] * log_sum).sum() / beta
            return E_AT - (g * (hidden @ feedforward.W_2.T)).sum()

        g = self.norm(x)
        return x - torch.func.grad(energy)(g, g) @ self.rate.eta.T


class AutogradAttention(AttentionEnergy):
    def readout(self) -> Readout:
        """Without alpha, which is in the energy, as in the paper, and so in its gradient."""
        return Readout(torch.cat([self.W_Q, self.W_K]))

    force = EnergyTerm.force


class AutogradFF2W(FF2W):
    force = EnergyTerm.force


def textbook_model(cfg: ModelConfig) -> LanguageModel:
    """NRGPT-FF2W, low rank, strict, with a free eta: the paper's energy, written with einsum, and
    torch.func.grad inside."""
    model = LanguageModel(cfg)
    model.blocks[0].__class__ = TextbookBlock
    return model


def autograd_model(cfg: ModelConfig) -> LanguageModel:
    """Our own energies, with torch.func.grad instead of forces written by hand."""
    model = LanguageModel(cfg)
    terms = model.energy_block.terms
    terms["attention"].__class__ = AutogradAttention
    terms["feedforward"].__class__ = AutogradFF2W
    return model
