"""The same model under other conditions: longer or shorter steps, another sharpness of attention,
with or without the safeguard. The explorer's sliders."""

import copy
from typing import TypeVar

import torch
from torch import Tensor

from ..check import check
from ..model.block import EnergyBlock
from ..model.certificate import Finding
from ..model.energy import AttentionEnergy
from ..model.network import Network
from ..model.norm import Norm
from ..model.rate import Rate
from ..model.transformer import TransformerBlock

AnyNetwork = TypeVar("AnyNetwork", bound=Network)


class Faster(Rate):
    """Another rate, times a factor."""

    def __init__(self, rate: Rate, factor: float):
        torch.nn.Module.__init__(self)
        self.rate, self.factor = rate, factor
        self.width, self.per_step, self.is_folded = rate.width, rate.per_step, rate.is_folded
        self.differs_by_term = rate.differs_by_term

    def fold(self, M: Tensor, norm: Norm, term: str) -> Tensor:
        return self.factor * self.rate.fold(M, norm, term)

    def apply_step(self, force: Tensor, t: int, x: Tensor, norm: Norm) -> Tensor:
        return self.rate.apply_step(force, t, x, norm)

    def combined(self, parts: dict[str, Tensor], t: int, x: Tensor, norm: Norm) -> Tensor:
        return self.rate.combined(parts, t, x, norm)  # the factor is in the parts

    def guarantee(self, norm: Norm) -> Finding:
        return self.rate.guarantee(norm)  # which asks for a direction, not for a length


@torch.no_grad()
def altered(
    model: AnyNetwork, *, rate: float = 1.0, beta: float = 1.0, cone: bool | None = None
) -> AnyNetwork:
    """A copy whose steps are ``rate`` times as long and whose attention is ``beta`` times as sharp.
    ``cone``: whether the safeguard acts; None: as it does in the model.

    >>> import nrgpt, torch
    >>> from nrgpt.dynamics.altered import altered
    >>> model = nrgpt.LanguageModel(nrgpt.ModelConfig(vocab_size=9, context=8, width=16, heads=2))
    >>> idx = torch.randint(9, (1, 8))
    >>> quick = nrgpt.trajectory(altered(model, rate=2.0), idx, steps=1)
    >>> slow = nrgpt.trajectory(model, idx, steps=1)
    >>> bool((quick.move > slow.move).all())
    True
    """
    check(0 < rate < float("inf"), "rate", rate, "positive and finite")
    check(0 < beta < float("inf"), "beta", beta, "positive and finite")
    if rate == 1 and beta == 1 and cone is None:
        return model
    other = copy.deepcopy(model)
    for block in other.blocks:
        if isinstance(block, EnergyBlock):
            block.rate = Faster(block.rate, rate) if rate != 1 else block.rate
            block.safeguard = block.safeguard if cone is None else cone
            for term in block.terms.values():
                if isinstance(term, AttentionEnergy):
                    term.beta *= beta
        elif isinstance(block, TransformerBlock):
            block.attention.scale *= beta
            written = (block.attention.W_P, block.attention.b_P)
            for weight in (*written, block.feedforward.W_2, block.feedforward.b_2):
                if weight is not None:
                    weight.mul_(rate)
    return other
