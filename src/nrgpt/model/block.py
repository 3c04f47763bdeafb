"""Blocks: what a model applies at every step.

A block owns weights. ``plan`` computes once what the steps of a forward pass share; then
``block(x, t, plan)`` takes step t. Two things may be added: a ``memory``, through which tokens see
earlier ones that are not in x, and ``masks``, which dropout multiplies each update with.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from .config import ModelConfig
from .energy import ENERGIES, EnergyTerm
from .norm import make_norm
from .past import Memory
from .rate import make_rate
from .step import Extra, Plan


class Steps(Protocol):
    """What a block's plan can do."""

    def move(
        self, x: Tensor, t: int, memory: Memory | None = None, masks: Tensor | None = None
    ) -> Tensor: ...

    def keep(self, x: Tensor, t: int, memory: Memory) -> None:
        """Let the memory hold the keys of x as those of step t."""


class Block(nn.Module, ABC):
    updates: int
    """How many updates a step makes, one after the other; dropout has a mask for each."""

    @abstractmethod
    def plan(self, extra: Extra | None = None, *, stacked: bool = False) -> Steps:
        """What the steps of one forward pass share. ``stacked`` plans are for decoding."""

    def forward(
        self,
        x: Tensor,
        t: int,
        plan: Steps,
        masks: Tensor | None = None,
    ) -> Tensor:
        return plan.move(x, t, None, masks)


class TotalEnergy(nn.Module):
    """The energy terms of a block, by name; ``extra`` ones join for one call."""

    def __init__(self, terms: dict[str, EnergyTerm]):
        super().__init__()
        self.terms = nn.ModuleDict(terms)

    def named_terms(self, extra: Extra | None = None) -> Iterator[tuple[str, EnergyTerm]]:
        yield from self.terms.items()  # type: ignore[misc]
        for name, term in (extra or {}).items():
            if not isinstance(term, EnergyTerm):
                raise ValueError(f"extra term {name!r} is {term!r}; it must be an EnergyTerm")
            if name in self.terms:
                raise ValueError(
                    f"extra term {name!r}: the model already has a term of that name; "
                    f"its terms are {', '.join(self.terms)}"
                )
            if name == "total":
                raise ValueError("extra term 'total': that is the name of the sum; rename it")
            yield name, term


class EnergyBlock(Block):
    """x <- x - eta dE/dg with g = norm(x): the gradient of an energy. No autograd inside."""

    updates = 1

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm = make_norm(cfg, learn_gamma=cfg.learn_gamma, learn_delta=cfg.learn_delta)
        kinds = {name: cfg.feedforward if name == "feedforward" else name for name in cfg.terms}
        self.energy = TotalEnergy({name: ENERGIES[kind](cfg) for name, kind in kinds.items()})
        self.rate = make_rate(cfg)
        self.safeguard = cfg.safeguard == "cone"

    @property
    def terms(self) -> dict[str, EnergyTerm]:
        return dict(self.energy.named_terms())

    def named_terms(self, extra: Extra | None = None) -> Iterator[tuple[str, EnergyTerm]]:
        return self.energy.named_terms(extra)

    def plan(self, extra: Extra | None = None, *, stacked: bool = False) -> Plan:
        terms, like = self.energy.named_terms(extra), next(self.parameters())
        options = {"stacked": stacked, "safeguard": self.safeguard}
        return Plan(self.norm, self.rate, terms, like=like, **options)
