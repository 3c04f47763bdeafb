"""Blocks: what a model applies at every step.

A block owns weights. ``plan`` computes once what the steps of a forward pass share; then
``block(x, t, plan)`` takes step t. Two things may be added: a ``memory``, through which tokens see
earlier ones that are not in x, and ``masks``, which dropout multiplies each update with.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor, nn

from .certificate import Certificate, Finding, Guarantee
from .config import ModelConfig
from .energy import ENERGIES, EnergyTerm
from .norm import Norm, make_norm
from .past import Memory
from .rate import make_rate
from .step import Extra, Plan


class Steps(Protocol):
    """What a block's plan can do."""

    def move(
        self, x: Tensor, t: int, memory: Memory | None = None, masks: Tensor | None = None
    ) -> Tensor: ...

    def begin(self, x: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory | None]:
        """From embeddings to the state that the steps start in, and the memory that they see."""

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
        memory: Memory | None = None,
        masks: Tensor | None = None,
    ) -> Tensor:
        return plan.move(x, t, memory, masks)


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


def with_curvature(found: Finding, term: EnergyTerm, norm: Norm) -> Finding:
    """What the cone makes of a term that is not concave, and says how much it curves."""
    if found.level is not Guarantee.SMALL_STEPS:
        return found
    bound = term.curvature(norm)
    if bound is None or not bool(bound.isfinite()):
        return found
    return Finding(found.part, Guarantee.EVERY_STEP, f"curves by at most {bound.item():.3g}")


def writes_of_its_own(name: str, term: EnergyTerm) -> list[Finding]:
    """A term whose moves have nothing to do with its force."""
    if term.readout().move is None:
        return []
    why = "tokens move by write weights of its own; only a safeguard keeps the energy from rising"
    return [Finding(f"writes of {name}", Guarantee.NONE, why)]


class EnergyBlock(Block):
    """x <- x - eta dE/dg with g = norm(x): the gradient of an energy. No autograd inside."""

    updates = 1

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm = make_norm(cfg, learn_gamma=cfg.learn_gamma, learn_delta=cfg.learn_delta)
        kinds = {name: cfg.feedforward if name == "feedforward" else name for name in cfg.terms}
        self.energy = TotalEnergy({name: self.make_term(kind, cfg) for name, kind in kinds.items()})
        self.rate = make_rate(cfg)
        self.settled = cfg.past == "settled"
        self.safeguard, self.margin = cfg.safeguard == "cone", cfg.margin

    def make_term(self, kind: str, cfg: ModelConfig) -> EnergyTerm:
        term: EnergyTerm = ENERGIES[kind](cfg)
        return term

    def guarantees(self, extra: Extra | None = None) -> Certificate:
        """Is descent proved, at the present weights? If not, which part is to blame?"""
        named = list(self.energy.named_terms(extra))
        found = [term.guarantee() for _, term in named]
        if self.safeguard:
            pairs = zip(found, named, strict=True)
            found = [with_curvature(finding, term, self.norm) for finding, (_, term) in pairs]
            return Certificate((*found, self.cone_guarantee(found)), self.settled)
        own = [finding for name, term in named for finding in writes_of_its_own(name, term)]
        return Certificate((*found, *own, self.rate.guarantee(self.norm)), self.settled)

    def cone_guarantee(self, terms: Iterable[Finding]) -> Finding:
        level, why = Guarantee.EVERY_STEP, "moves stay in the cone around the force, with any eta"
        if any(term.level < Guarantee.EVERY_STEP for term in terms):
            level = Guarantee.NONE
            why = "the cone needs energies that are concave, or state how much they curve"
        elif not all(bool(p.isfinite().all()) for p in self.parameters()):
            level, why = Guarantee.NONE, "weights are not finite"
        return Finding("safeguard cone", level, why)

    @property
    def terms(self) -> dict[str, EnergyTerm]:
        return dict(self.energy.named_terms())

    def named_terms(self, extra: Extra | None = None) -> Iterator[tuple[str, EnergyTerm]]:
        return self.energy.named_terms(extra)

    def plan(
        self, extra: Extra | None = None, *, stacked: bool = False, is_free: bool = False
    ) -> Plan:
        """``is_free``: without the safeguard."""
        terms, like = self.energy.named_terms(extra), next(self.parameters())
        return Plan(
            self.norm,
            self.rate,
            terms,
            like=like,
            stacked=stacked,
            settled=self.settled,
            safeguard=self.safeguard and not is_free,
            margin=self.margin,
        )
