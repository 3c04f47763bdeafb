"""Does the energy go down? What a model can say of itself, and which part is to blame if not.

Three levels, each for one token while its past stands still (none of this holds under dropout):

EVERY_STEP   E never rises, however large the steps. Needs energies that are concave in the
             token's own g, and eta = c Gamma with c > 0 (without a norm: a positive
             semi-definite symmetric part of eta), or the cone (nrgpt.model.safeguard), with
             any eta, which needs energies that are concave or state how much they curve.
             docs/equations.md has the proofs.
SMALL_STEPS  E falls along the flow in continuous time (the paper's Propositions 1 and 2), so a
             small enough step lowers it; the step that is taken may be too large.
NONE         nothing is promised.

Whether the past does stand still is another question. With ``past="settled"`` it does: what is
proved is the forward pass itself. With ``past="moving"``, as in the paper, all tokens move at once:
a token's step does not raise its energy among the keys as they were before the step, and what these
keys do next is not covered. A certificate says which of the two it is.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple


class Guarantee(IntEnum):
    NONE = 0
    SMALL_STEPS = 1
    EVERY_STEP = 2


class Finding(NamedTuple):
    """What one part of the model allows, and why."""

    part: str
    level: Guarantee
    why: str


@dataclass(frozen=True)
class Certificate:
    """True where descent is guaranteed at every step; otherwise ``blame`` says what prevents it."""

    findings: tuple[Finding, ...]
    settled: bool = False
    """Whether the past stands still in the forward pass, so that it is the forward pass of which
    this speaks."""
    whole: bool = False
    """Whether it speaks of one energy of the whole sequence, and so of the forward pass too."""
    check: Any = None
    """What was measured on data, if asked for: a nrgpt.dynamics.descent.Descent."""

    @property
    def level(self) -> Guarantee:
        return min(finding.level for finding in self.findings)

    @property
    def blame(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.level < Guarantee.EVERY_STEP)

    @property
    def condition(self) -> str:
        """Under which the energies fall."""
        if self.whole:
            return "in the forward pass (one energy for the whole sequence)"
        if self.settled:
            return "in the forward pass (the past is settled)"
        return "while the past stands still (in the forward pass it moves)"

    def __bool__(self) -> bool:
        return self.level is Guarantee.EVERY_STEP

    @property
    def title(self) -> str:
        return {
            Guarantee.EVERY_STEP: f"proved: no step raises an energy {self.condition}",
            Guarantee.SMALL_STEPS: f"proved for small enough steps only, {self.condition}",
            Guarantee.NONE: "no descent is proved",
        }[self.level]

    def __repr__(self) -> str:
        return f"Certificate({self.title})"

    def __str__(self) -> str:
        width = max(len(finding.part) for finding in self.findings)
        lines = [f"  {f.part:<{width}}  {f.level.name:<11}  {f.why}" for f in self.findings]
        measured = [] if self.check is None else ["measured:", str(self.check)]
        return "\n".join([self.title, *lines, *measured])
