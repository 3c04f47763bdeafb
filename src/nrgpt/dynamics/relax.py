"""Let tokens roll: with which solver, for how many steps, and when each of them has arrived.

``relax(model, idx)`` is the model's own forward pass. Tokens that have arrived are no longer
computed: they stay where they are, and later tokens keep seeing them there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..check import check, check_choice
from ..model.network import Network
from ..model.step import Extra, Observation
from .field import Field
from .short import short
from .solvers import Plain, Solver

RuleName = Literal["energy", "force", "entropy", "kl", "argmax"]


@dataclass(frozen=True)
class Stop:
    """When a token has arrived: a rule must hold ``patience`` times in a row. P is what the model
    would say if it stopped there.

    energy   |change of E| <= tolerance x max(1, |E|)
    force    ||dE/dg|| <= tolerance
    entropy  entropy of P <= tolerance, in nats
    kl       KL(P now || P one step ago) <= tolerance, in nats
    argmax   the likeliest token is that of one step ago (the tolerance is not used)
    """

    rule: RuleName
    tolerance: float = 1e-2
    patience: int = 1
    minimum: int = 1
    """Steps that every token takes."""

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, get_args(RuleName))
        check(self.tolerance >= 0, "tolerance", self.tolerance, "at least 0")
        check(self.patience >= 1, "patience", self.patience, "at least 1")
        check(self.minimum >= 0, "minimum", self.minimum, "at least 0")

    def measure(self, look: Observation, logits: Callable[[], Tensor]) -> Tensor:
        """What the rule compares, (batch, tokens) or (batch, tokens, vocabulary)."""
        if self.rule == "energy":
            return look.energy
        if self.rule == "force":
            return look.force.norm(dim=-1)
        log_p = logits().log_softmax(-1)
        if self.rule == "entropy":
            return -(log_p.exp() * log_p).sum(-1)
        return log_p if self.rule == "kl" else log_p.argmax(-1)

    def holds(self, before: Tensor | None, now: Tensor) -> Tensor:
        """For each token, (batch, tokens), given what was measured; ``before`` is one step ago."""
        if self.rule in ("force", "entropy"):
            return now <= self.tolerance
        if before is None:
            return torch.zeros(now.shape[:2], dtype=torch.bool, device=now.device)
        if self.rule == "energy":
            return (now - before).abs() <= self.tolerance * now.abs().clamp(min=1)
        if self.rule == "kl":
            return (now.exp() * (now - before)).sum(-1) <= self.tolerance
        return now == before


class Arrivals:
    """Which of the tokens ``idx`` have not arrived yet; told of every step by ``update``."""

    def __init__(self, stop: Stop, readout: Callable[[Tensor], Tensor], idx: Tensor):
        self.stop, self.readout = stop, readout
        self.before: Tensor | None = None
        self.held = torch.zeros_like(idx)
        """For how many steps in a row the rule has held."""
        self.going = torch.ones_like(idx, dtype=torch.bool)

    def update(self, x: Tensor, look: Observation, t: int) -> Tensor:
        """Which of the tokens, now in state x, go on: (batch, tokens)."""
        now = self.stop.measure(look, lambda: self.readout(x))
        self.held = torch.where(self.stop.holds(self.before, now), self.held + 1, 0)
        is_early = (self.held < self.stop.patience) | (t < self.stop.minimum)
        self.before, self.going = now, self.going & is_early
        return self.going

    def select(self, rows: Tensor, columns: Tensor) -> None:
        """Keep only the tokens at [rows, columns]."""
        self.held, self.going = self.held[rows, columns], self.going[rows, columns]
        self.before = None if self.before is None else self.before[rows, columns]


@short
@dataclass(frozen=True)
class Relaxed:
    x: Tensor
    """The tokens' last states, (batch, tokens, D)."""
    steps: Tensor
    """Steps that each token took, (batch, tokens)."""
    computed: int
    """Token states that were computed, fillers included: the cost."""


@torch.no_grad()
def relax(
    model: Network,
    idx: Tensor,
    *,
    steps: int | None = None,
    solver: Solver | None = None,
    stop: Stop | None = None,
    past: Tensor | None = None,
    extra: Extra | None = None,
) -> Relaxed:
    """Roll the tokens ``idx`` (batch, tokens) down for at most ``steps`` steps.

    ``past`` holds earlier tokens in these states; None lets all move together, as in training.
    ``model.readout(relaxed.x)`` gives logits.

    >>> import nrgpt, torch
    >>> from nrgpt.dynamics.relax import Stop, relax
    >>> cfg = nrgpt.ModelConfig(vocab_size=65, context=32, width=16, heads=2, steps=8)
    >>> model, idx = nrgpt.LanguageModel(cfg), torch.randint(65, (2, 32))
    >>> torch.allclose(model.readout(relax(model, idx).x), model(idx)[0], atol=1e-5)
    True
    >>> relax(model, idx, steps=50, stop=Stop("energy", 1e-3)).steps.shape
    torch.Size([2, 32])
    """
    solver = Plain() if solver is None else solver
    solver.begin()
    steps = model.check_steps(steps)
    x = model.begin(idx, extra)
    tokens = idx.shape[1]
    field = Field(model, x, extra=extra, past=past)
    last, taken = x.clone(), torch.zeros_like(idx)
    positions = field.everywhere  # of the tokens in x; fillers have the position ``tokens``
    going = torch.ones_like(idx, dtype=torch.bool)
    arrivals = None if stop is None else Arrivals(stop, model.readout, idx)
    computed = 0
    for t in range(steps):
        field.commit(x)
        look = field.look(x, t)
        if arrivals is not None:
            going = arrivals.update(x, look, t)
            width = int(going.sum(1).max())
            if width == 0:
                break
            if width < x.shape[1]:  # compute only tokens that go on, packed together, and fillers
                first = going.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
                columns = first[:, :width]
                rows, going = rows_of(columns), going.gather(1, columns)
                positions = positions[rows, columns].masked_fill(~going, tokens)
                x, look = x[rows, columns], look.select(rows, columns)
                arrivals.select(rows, columns)
                solver.select(rows, columns)
                field.aim(positions)
        x = torch.where(going.unsqueeze(-1), solver.step(field, look, x, t), x)
        computed += positions.numel()
        row, place = rows_of(positions)[going], positions[going]
        last[row, place] = x[going]
        taken[row, place] = t + 1
    return Relaxed(last, taken, computed)


def rows_of(entries: Tensor) -> Tensor:
    """The row number of each entry."""
    return torch.arange(len(entries), device=entries.device)[:, None].expand_as(entries)
