"""Let tokens roll: with which solver, for how many steps, and when each of them has arrived.

The model's own forward pass is ``relax(model, idx)``. Tokens that have arrived are no longer
computed: they stay where they are, and later tokens go on seeing them there.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..check import check, check_choice
from ..model.network import Network
from ..model.step import Extra, Observation
from .field import Field
from .solvers import Plain, Solver

RuleName = Literal["energy", "force", "entropy", "kl", "argmax"]


@dataclass(frozen=True)
class Stop:
    """When a token has arrived: a rule must hold ``patience`` times in a row.

    energy   |change of E| <= tolerance x max(1, |E|)
    force    ||dE/dg|| <= tolerance
    entropy  the readout's entropy <= tolerance, in nats
    kl       KL(readout now || readout one step ago) <= tolerance, in nats
    argmax   the likeliest token is that of one step ago (tolerance is not looked at)
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

    @property
    def reads_out(self) -> bool:
        return self.rule in ("entropy", "kl", "argmax")

    def holds(self, before: "Sight | None", now: "Sight") -> Tensor:
        """For each token, (batch, tokens)."""
        if self.rule == "force":
            return now.look.force.norm(dim=-1) <= self.tolerance
        if self.rule == "entropy":
            assert now.log_p is not None
            return -(now.log_p.exp() * now.log_p).sum(-1) <= self.tolerance
        if before is None:
            return torch.zeros_like(now.look.energy, dtype=torch.bool)
        if self.rule == "energy":
            size = now.look.energy.abs().clamp(min=1)
            return (now.look.energy - before.look.energy).abs() <= self.tolerance * size
        assert now.log_p is not None
        assert before.log_p is not None
        if self.rule == "kl":
            change = (now.log_p.exp() * (now.log_p - before.log_p)).sum(-1)
            return change <= self.tolerance
        return now.log_p.argmax(-1) == before.log_p.argmax(-1)


class Sight(NamedTuple):
    look: Observation
    log_p: Tensor | None

    def select(self, rows: Tensor, columns: Tensor) -> "Sight":
        log_p = None if self.log_p is None else self.log_p[rows, columns]
        return Sight(self.look.select(rows, columns), log_p)


@dataclass(frozen=True)
class Relaxed:
    x: Tensor
    """The tokens' last states, (batch, tokens, D)."""
    steps: Tensor
    """Steps that each token took, (batch, tokens)."""
    computed: int
    """Token states that were computed, fillers included: what it cost."""


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

    ``past``: states that earlier tokens are held at; None lets all move together, as in training.
    Read out with ``model.readout(relaxed.x)``.

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
    x = model.embed(idx)
    batch, tokens = idx.shape
    field = Field(model, batch, tokens, extra=extra, past=past)
    last, taken = x.clone(), torch.zeros_like(idx)
    positions = field.everywhere  # of the tokens in x; fillers have the position ``tokens``
    going = torch.ones_like(idx, dtype=torch.bool)
    held = torch.zeros_like(idx)  # for how many steps the rule has held
    before: Sight | None = None
    computed = 0
    for t in range(steps):
        field.commit(x)
        look = field.look(x, t)
        if stop is not None:
            now = Sight(look, model.readout(x).log_softmax(-1) if stop.reads_out else None)
            held = torch.where(stop.holds(before, now), held + 1, 0)
            going = going & ((held < stop.patience) | (t < stop.minimum))
            width = int(going.sum(1).max())
            if width == 0:
                break
            if width < x.shape[1]:  # the others move together, and are computed alone
                rows, columns, filler = pack(going)
                positions = positions[rows, columns].masked_fill(filler, tokens)
                x, held, now = x[rows, columns], held[rows, columns], now.select(rows, columns)
                going, look = ~filler, now.look
                solver.select(rows, columns)
                field.aim(positions)
            before = now
        x = torch.where(going.unsqueeze(-1), solver.step(field, look, x, t), x)
        computed += positions.numel()
        own, place = rows_of(positions)[going], positions[going]
        last[own, place] = x[going]
        taken[own, place] = t + 1
    return Relaxed(last, taken, computed)


def rows_of(positions: Tensor) -> Tensor:
    """The number of the row of each entry."""
    return torch.arange(len(positions), device=positions.device)[:, None].expand_as(positions)


def pack(going: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the True entries of each row are, moved together: (rows, columns) to index with, and
    which of the result only fill a row up."""
    counts = going.sum(1)
    width = int(counts.max())
    columns = going.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]
    rows = torch.arange(len(going), device=going.device)[:, None].expand_as(columns)
    return rows, columns, ~going[rows, columns]
