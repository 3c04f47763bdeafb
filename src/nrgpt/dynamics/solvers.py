"""Ways down the same energy. A solver moves tokens, and may remember something about each.

plain         x <- x + u with u = -eta dE/dg: the model's own steps
backtracking  x <- x + s u with s = 1, 1/2, 1/4, ... for each token, until its energy does not rise
momentum      v <- mu v + u, x <- x + v
anderson      plain steps, extrapolated from the last few; a plain step where that would raise E
langevin      samples exp(-E / T) at a temperature T, where the norm leaves a density to sample
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..check import check
from ..model.step import Observation
from .field import Field
from .landscape import surface_of
from .sampling import Heat, Point


class Solver(ABC):
    """How tokens get from one state to the next. Its memory lasts for one call of ``relax``."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything, before other tokens come."""
        self.memory: dict[str, Tensor] = {}
        """By name, each (batch, tokens, ...)."""

    @abstractmethod
    def step(self, field: Field, look: Observation, x: Tensor, t: int) -> Tensor:
        """The tokens' next states."""

    def select(self, rows: Tensor, columns: Tensor) -> None:
        """Keep only the tokens at [rows, columns]."""
        self.memory = {name: value[rows, columns] for name, value in self.memory.items()}


class Plain(Solver):
    def step(self, field: Field, look: Observation, x: Tensor, t: int) -> Tensor:
        return x + look.update


class Backtracking(Solver):
    """No step raises a token's energy, given the present keys of its past. A token for which even
    the smallest step would stays where it is."""

    def __init__(self, shrink: float = 0.5, tries: int = 12):
        super().__init__()
        check(0 < shrink < 1, "shrink", shrink, "in (0, 1)")
        check(tries >= 1, "tries", tries, "at least 1")
        self.shrink, self.tries = shrink, tries

    def step(self, field: Field, look: Observation, x: Tensor, t: int) -> Tensor:
        move = look.update
        size = torch.ones_like(look.energy)
        for _ in range(self.tries):
            tried = x + size.unsqueeze(-1) * move
            rises = field.energy(tried, t) > look.energy
            if not rises.any():
                return tried
            size = torch.where(rises, size * self.shrink, size)
        return torch.where(rises.unsqueeze(-1), x, tried)


class Momentum(Solver):
    def __init__(self, mu: float = 0.5):
        super().__init__()
        check(0 <= mu < 1, "mu", mu, "in [0, 1)")
        self.mu = mu

    def step(self, field: Field, look: Observation, x: Tensor, t: int) -> Tensor:
        v = self.memory["v"] = look.update + self.mu * self.memory.get("v", 0)
        return x + v


class Anderson(Solver):
    """Each token mixes its last ``memory`` steps so that the mixed move is as small as possible."""

    def __init__(self, memory: int = 3, ridge: float = 1e-8):
        super().__init__()
        check(memory >= 1, "memory", memory, "at least 1")
        self.length, self.ridge = memory, ridge

    def step(self, field: Field, look: Observation, x: Tensor, t: int) -> Tensor:
        move, plain = look.update, x + look.update
        if not self.memory:
            self.remember(x, move)
            return plain
        dx = x.unsqueeze(-2) - self.memory["x"]  # (batch, tokens, m, D)
        dmove = move.unsqueeze(-2) - self.memory["move"]
        gram = dmove @ dmove.mT
        scale = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        eye = torch.eye(gram.shape[-1], dtype=x.dtype, device=x.device)
        numbers = torch.finfo(x.dtype)
        ridge = max(self.ridge, 10 * numbers.eps)  # less would be lost in rounding
        right = dmove @ move.unsqueeze(-1)
        # Moves are often parallel. If the system is singular nevertheless, a plain step is taken.
        theta, _ = torch.linalg.solve_ex(gram + (ridge * scale + numbers.tiny) * eye, right)
        mixed = plain - ((dx + dmove).mT @ theta).squeeze(-1)
        self.remember(x, move)
        helps = torch.isfinite(mixed).all(-1) & (field.energy(mixed, t) <= look.energy)
        return torch.where(helps.unsqueeze(-1), mixed, plain)

    def remember(self, x: Tensor, move: Tensor) -> None:
        for name, new in (("x", x), ("move", move)):
            old = [self.memory[name]] if name in self.memory else []
            both = torch.cat([*old, new.unsqueeze(-2)], dim=-2)
            self.memory[name] = both[..., -self.length :, :]


class Langevin(Solver):
    """Samples instead of descending: see ``sampling``. Tokens keep their size |x| (and, under
    LayerNorm, their mean), and their directions walk on the sphere of the norm.

    Where the past is fixed or settled, each token's states have, in the long run, Boltzmann's
    weights exp(-E / T): nearly for small rates, exactly with ``metropolis`` (which looks twice a
    step). Where the past moves, only the first token's do, whose landscape never changes. Every
    other follows weights that change as its past walks, so the states together have no such law.
    """

    def __init__(
        self,
        temperature: float,
        rate: float = 1e-2,
        *,
        metropolis: bool = False,
        generator: torch.Generator | None = None,
    ):
        self.heat = Heat(temperature, rate, metropolis=metropolis, generator=generator)
        super().__init__()

    def begin(self) -> None:
        super().begin()
        self.accepted: list[float] = []
        """The share of tokens that moved, at each step since ``begin``."""

    def step(self, field: Field, look: Observation, x: Tensor, t: int) -> Tensor:
        norm, width = field.plan.norm, x.shape[-1]
        surface, inner, r = surface_of(norm, width), norm.centred(x), norm.scale(x)
        # x less its mean is size u, with |u|^2 = D; it gives the norm's output size u / r.
        size = inner.norm(dim=-1, keepdim=True) / width**0.5 if norm.gamma is not None else r

        def at(u: Tensor, look: Observation) -> Point:
            force = look.force if norm.gamma is None else norm.gamma * look.force
            return Point(u, look.energy, surface.tangent(u, -force * size / r))

        def state(u: Tensor) -> Tensor:
            return x - inner + size * u

        here = at(inner / size, look)
        move, u = self.heat.propose(surface, here)
        moved = torch.ones_like(here.energy, dtype=torch.bool)
        if self.heat.metropolis:
            moved = self.heat.accepts(surface, here, at(u, field.look(state(u), t)), move)
        self.accepted.append(moved.float().mean().item())
        return torch.where(moved.unsqueeze(-1), state(u), x)


SOLVERS: dict[str, Any] = {
    kind.__name__.lower(): kind for kind in (Plain, Backtracking, Momentum, Anderson, Langevin)
}
