"""Energy terms to add at inference: model(idx, extra={"name": term}), generate(..., extra=...).

They act on g, and through it on what the model says. They are not trained with the model; each has
a weight, and costs something in loss: measure it. The weight is a number, or a function of the
inference step (nrgpt.dynamics.schedules).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..check import check
from ..model.certificate import Finding, Guarantee
from ..model.energy import EnergyTerm, Readout
from ..model.network import Network
from ..model.past import Past, Shown
from .schedules import Schedule


class Regulariser(EnergyTerm):
    """A term with a weight, which may be a function of the inference step.

    >>> import nrgpt, torch
    >>> from nrgpt.dynamics.regularise import Toward
    >>> from nrgpt.dynamics.schedules import linear
    >>> model = nrgpt.LanguageModel(nrgpt.ModelConfig(vocab_size=9, context=8, width=16, heads=2))
    >>> logits, _ = model(torch.randint(9, (2, 8)), extra={"pull": Toward(torch.randn(16), 0.5)})
    >>> extra = {"pull": Toward(torch.randn(16), linear(0, 1, model.cfg.steps))}
    >>> new = model.generate([[1, 2, 3]], max_new_tokens=4, extra=extra)
    """

    is_linear = False
    """In g, and so concave."""

    def __init__(self, weight: float | Schedule, least: float = float("-inf")):
        super().__init__()
        if not callable(weight):
            check(weight >= least, "weight", weight, f"at least {least:g}")
        self.weight, self.least = weight, least

    def weight_at(self, past: Past) -> float:
        if not callable(self.weight):
            return self.weight
        if past.t is None:
            raise ValueError(
                f"the weight of {type(self).__name__} depends on the inference step, and there is "
                "none outside of a forward pass; use a number as its weight"
            )
        value = self.weight(past.t)
        check(value >= self.least, f"weight({past.t})", value, f"at least {self.least:g}")
        return value

    def guarantee(self) -> Finding:
        name = type(self).__name__
        if callable(self.weight):
            why = "its weight, and so the energy, changes from step to step"
            return Finding(name, Guarantee.NONE, why)
        if self.is_linear:
            return Finding(name, Guarantee.EVERY_STEP, "concave: linear in g")
        return super().guarantee()


class Toward(Regulariser):
    """E = -weight (g . v) / ||v||: a constant pull along a direction, or a push if weight < 0.

    Linear, so concave: a certified model stays certified with it.
    """

    is_linear = True
    v: Tensor

    def __init__(self, direction: Tensor, weight: float | Schedule):
        super().__init__(weight)
        is_direction = direction.dim() == 1 and bool(direction.norm() > 0)
        check(is_direction, "direction", direction.shape, "of shape (D,), and not zero")
        self.register_buffer("v", direction / direction.norm())

    def energy(self, z: Tensor, past: Past) -> Tensor:
        return -self.weight_at(past) * (z @ self.v)

    def force(self, z: Tensor, past: Past) -> Tensor:
        return (self.weight_at(past) * self.v).expand_as(z)


class Says(Regulariser):
    """E = -weight log P(the next token is one of ``tokens``); a negative weight avoids them.

    The head reads x through the final norm. Its output and g are the same normalised token with
    other gammas and deltas, so the logits can be computed from g as well. This takes a norm of the
    block's own kind and no gamma that is zero.
    """

    head: Tensor
    bias: Tensor
    tokens: Tensor

    def __init__(self, model: Network, tokens: Sequence[int], weight: float | Schedule):
        super().__init__(weight)
        check(len(tokens) > 0, "tokens", tokens, "at least one")
        model.check_vocabulary(torch.tensor(list(tokens)))
        norm, final = model.energy_block.norm, model.final_norm
        head = model.head_weight.detach()
        bias = torch.zeros_like(head[:, 0]) if model.head_bias is None else model.head_bias.detach()
        if norm.gamma is not None:
            assert final.gamma is not None
            if bool((norm.gamma == 0).any()):
                raise ValueError(
                    "a gamma of this model is zero: its logits cannot be computed from g"
                )
            # u = (g - delta) / gamma, and the head reads gamma_final u + delta_final
            scale = (final.gamma / norm.gamma).detach()
            delta, final_delta = (getattr(n, "delta", scale.new_zeros(())) for n in (norm, final))
            bias = bias + head @ (final_delta - delta * scale).detach().expand_as(scale)
            head = head * scale
        self.register_buffer("head", head)
        self.register_buffer("bias", bias)
        self.register_buffer("tokens", torch.tensor(list(tokens)))

    def logits(self, g: Tensor) -> Tensor:
        return F.linear(g, self.head, self.bias)

    def energy(self, z: Tensor, past: Past) -> Tensor:
        logits = self.logits(z)
        chosen = logits[..., self.tokens].logsumexp(-1)
        return -self.weight_at(past) * (chosen - logits.logsumexp(-1))

    def force(self, z: Tensor, past: Past) -> Tensor:
        logits = self.logits(z)
        wanted = logits[..., self.tokens].softmax(-1) @ self.head[self.tokens]
        return self.weight_at(past) * (wanted - logits.softmax(-1) @ self.head)


class Bounded(Regulariser):
    """E = (weight / 2) max(0, E_term - bound)^2: keeps another term's energy below a bound.

    ``term`` is any term. One of the model's own (``model.energy_block.terms["attention"]``) then
    counts once as itself, and once more where it is above the bound.
    """

    def __init__(self, term: EnergyTerm, bound: float, weight: float | Schedule):
        super().__init__(weight, least=0.0)
        self.term, self.bound = term, bound

    def readout(self) -> Readout:
        readout = self.term.readout()
        if readout.field is not None:
            raise ValueError(
                f"term = {type(self.term).__name__}: it has a constant field, which cannot be "
                "bounded; bound a term without one"
            )
        return readout

    def keys(self, z: Tensor, g: Tensor) -> Shown | None:
        return self.term.keys(z, g)

    def energy(self, z: Tensor, past: Past) -> Tensor:
        return self.weight_at(past) / 2 * F.relu(self.term.energy(z, past) - self.bound).square()

    def force(self, z: Tensor, past: Past) -> Tensor:
        energy, force = self.term.energy_and_force(z, past)
        above = self.weight_at(past) * F.relu(energy - self.bound)
        return above.unsqueeze(-1) * force


@torch.no_grad()
def concept_vector(model: Network, having: Tensor, lacking: Tensor) -> Tensor:
    """The difference between the mean last g of two sets of texts (batch, tokens): a direction for
    ``Toward`` that tells one set from the other."""
    last = (model.last_state(idx, dropout=False) for idx in (having, lacking))
    a, b = (model.energy_block.norm(x).flatten(0, 1).mean(0) for x in last)
    return a - b
