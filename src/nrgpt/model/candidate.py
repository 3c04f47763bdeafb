"""A neighbour of NRGPT: the Energy-Based Transformer (Gladstone et al. 2025), ``block="ebt"``.

The energy is a transformer's output. At every place A it judges a candidate for the next token,
beside the text up to A:

    h = softmax(v_A) C + place_A         a distribution over tokens, mixed to an embedding
    E_A = w . norm(the layers(h_A))      where h_A sees the observed tokens B <= A, and itself
    v_A <- v_A - c V dE_A/dv_A           V: as many tokens as there are; softmax(0) is 1 / V each

A state is the candidate's logits v, which begin at zero, and what the model says is the state. The
slope is autograd's, so training differentiates a derivative. Observed tokens see one another, and
never a candidate: their keys and values are made once for all steps.

Candidates of different places do not see one another either. So all places are computed at once,
and each is as if it were alone (tests/model/test_candidate.py).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .block import Block
from .config import ModelConfig
from .init import log_rate, normal, parameter
from .norm import make_norm
from .past import Memory, Past, Shown, WholeText
from .planned import Extra, Observation
from .transformer import Joined, SequentialBlock


class Observed:
    """A memory that notes what the observed tokens show, layer by layer."""

    def __init__(self) -> None:
        self.shown: list[Shown] = []

    def past(self, t: int | None, slot: int, shown: Shown | None) -> Past:
        assert shown is not None
        self.shown.append(shown)
        return WholeText(t, shown)


class Beside(Past):
    """What a candidate sees: the observed tokens up to its place, and itself."""

    def __init__(self, t: int | None, observed: Shown, shown: Shown | None):
        super().__init__(t, shown)
        self.observed = observed

    def at(self, t: int | None) -> "Beside":
        return Beside(t, self.observed, self.shown)

    def scores(self, q: Tensor, scale: float) -> Tensor:
        """(batch, heads, places, observed tokens + 1)"""
        keys, sees = self.visible(strict=False)
        scores = (q @ keys.mT).masked_fill(~sees, -torch.inf)
        return scale * torch.cat([scores, (q * self.own).sum(-1, keepdim=True)], dim=-1)

    def attend(self, q: Tensor, scale: float, *, strict: bool) -> Tensor:
        values, own = self.observed[1], self.shown[1]  # type: ignore[index]
        p = self.scores(q, scale).softmax(-1)
        return p[..., :-1] @ values + p[..., -1:] * own

    def logsumexp(self, q: Tensor, scale: float, *, strict: bool) -> Tensor:
        return self.scores(q, scale).logsumexp(-1)

    def visible(self, *, strict: bool) -> tuple[Tensor, Tensor]:
        keys = self.observed[0]
        there = torch.arange(keys.shape[-2], device=keys.device)
        return keys, (there <= there[:, None])[None, None]


class Context(NamedTuple):
    """What candidates see at all steps: keys and values of the observed tokens, by layer. The
    layers ask for them by number."""

    shown: Sequence[Shown]

    def past(self, t: int | None, slot: int, shown: Shown | None) -> Past:
        assert t is not None
        return Beside(t, self.shown[t], shown)


class CandidatePlan(NamedTuple):
    block: "CandidateBlock"
    joined: list[Joined]

    def begin(self, x: Tensor, memory: Memory | None = None) -> tuple[Tensor, Context]:
        """Candidates that say nothing yet, and what they will see of the tokens x."""
        observed = Observed()
        for number, (layer, joined) in enumerate(zip(self.block.layers, self.joined, strict=True)):
            if number + 1 == len(self.joined):  # of the last layer, only keys and values are seen
                layer.attention.read(layer.norm_1(x), joined, number, observed)
            else:
                x = layer.step(x, number, joined, observed, None)
        nothing = x.new_zeros(*x.shape[:-1], len(self.block.candidates))
        return nothing, Context(observed.shown)

    def energy(self, v: Tensor, memory: Memory | None) -> Tensor:
        """E of each candidate, (batch, places)."""
        block = self.block
        x = v.softmax(-1).to(block.candidates.dtype) @ block.candidates
        x = x + block.places[: v.shape[1]]
        for number, (layer, joined) in enumerate(zip(block.layers, self.joined, strict=True)):
            x = layer.step(x, number, joined, memory, None)
        return block.norm(x) @ block.w

    def slope(self, v: Tensor, memory: Memory | None) -> Tensor:
        """dE_A/dv_A: no other place has a share in it."""
        function: Callable[[Tensor], Tensor] = lambda v: self.energy(v, memory).sum()  # noqa: E731
        return torch.func.grad(function)(v)

    def move(
        self, x: Tensor, t: int, memory: Memory | None = None, masks: Tensor | None = None
    ) -> Tensor:
        return x - self.block.rate * self.slope(x, memory)

    def observe(self, x: Tensor, t: int, memory: Memory | None = None) -> Observation:
        """Energies, forces on v, and what a step adds to it."""
        with torch.autocast(x.device.type, enabled=False):
            force = -self.slope(x, memory)
            found = {"candidate": self.energy(x, memory)}
            return Observation(x, found, {"candidate": force}, self.block.rate * force)

    def keep(self, x: Tensor, t: int, memory: Memory) -> None:
        raise ValueError("block = 'ebt': there is no cache of its steps; use cache = 'none'")


class CandidateBlock(Block):
    """``cfg.layers`` layers of a GPT, which candidates go through beside the observed tokens."""

    updates = 1

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.stack = nn.ModuleList(SequentialBlock(cfg) for _ in range(cfg.layers))
        self.norm = make_norm(cfg, learn_gamma=False, learn_delta=False)  # w has their part
        self.candidates = parameter(cfg.vocab_size, cfg.width, start=normal)
        self.places = parameter(cfg.context, cfg.width, start=normal)
        self.w = parameter(cfg.width, start=normal)
        self.log_c = parameter(1, start=log_rate)

    @property
    def rate(self) -> Tensor:
        """c V."""
        return self.log_c.exp() * len(self.candidates)

    def plan(self, extra: Extra | None = None, *, stacked: bool = False) -> CandidatePlan:
        if extra:
            raise ValueError(
                f"extra terms {', '.join(extra)}: only block='nrgpt' has an energy to add to"
            )
        return CandidatePlan(self, [layer.attention.joined() for layer in self.layers])

    @property
    def layers(self) -> list[SequentialBlock]:
        return list(self.stack)  # type: ignore[arg-type]
