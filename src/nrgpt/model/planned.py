"""What the plan of a forward pass holds for each term, and what an observation shows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .energy.term import EnergyTerm, Readout
from .norm import Norm
from .past import Past

Extra = Mapping[str, EnergyTerm]
"""Terms that join a model's own for one call, by name."""


class Fast(NamedTuple):
    """Shorter ways to what the contract says, for the terms that have one."""

    update: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """``update(g, back, field)``: the term's part of a step, for a whole text."""
    force: Callable[[Tensor | None, Tensor, Callable[[Tensor], Past]], Tensor]
    """``force(left, z, past)``: the force on the right of those of other terms, for tokens among
    kept keys; ``past`` is a function of their own."""


class Planned(NamedTuple):
    """A term and its weights for one forward pass."""

    name: str
    term: EnergyTerm
    readout: Readout
    back: Tensor
    """eta write^T, (D, n), or eta move."""
    field: Tensor | None
    """eta field, (D,)."""
    fast: Fast | None
    """How a kernel computes the same; None: by the contract's methods."""


class Stack(NamedTuple):
    """All terms' weights as one readout and one way back: two products a step. For decoding, where
    so little is computed that the number of products is what counts."""

    read: Tensor
    bias: Tensor | None
    sizes: list[int]
    back: Tensor
    field: Tensor | None


class Observation(NamedTuple):
    """Tokens in one state. Energies are (batch, tokens) and forces -dE/dg (batch, tokens, D), by
    term; ``update`` is what a step adds to x, and ``push`` how much of it the safeguard does:
    (batch, tokens), None without one."""

    g: Tensor
    energies: dict[str, Tensor]
    forces: dict[str, Tensor]
    update: Tensor
    push: Tensor | None = None

    @property
    def energy(self) -> Tensor:
        return torch.stack(list(self.energies.values())).sum(0)

    @property
    def force(self) -> Tensor:
        return torch.stack(list(self.forces.values())).sum(0)

    def select(self, rows: Tensor, columns: Tensor) -> "Observation":
        """Of the tokens at [rows, columns]."""
        energies, forces = (
            {name: value[rows, columns] for name, value in named.items()}
            for named in (self.energies, self.forces)
        )
        push = None if self.push is None else self.push[rows, columns]
        g, update = self.g[rows, columns], self.update[rows, columns]
        return Observation(g, energies, forces, update, push)


def stack_of(terms: Sequence[Planned]) -> Stack | None:
    """None if there is more to a step than two products with weights."""
    reads, biases, sizes = [], [], []
    for _, _, readout, _, _, _ in terms:
        if readout.read is None or readout.move is not None:
            return None
        rows = len(readout.read)
        none = readout.read.new_zeros(rows)
        reads.append(readout.read)
        biases.append(none if readout.bias is None else readout.bias)
        sizes.append(rows)
    has_bias = any(planned.readout.bias is not None for planned in terms)
    fields = [planned.field for planned in terms if planned.field is not None]
    return Stack(
        torch.cat(reads),
        torch.cat(biases) if has_bias else None,
        sizes,
        torch.cat([planned.back for planned in terms], dim=1),
        torch.stack(fields).sum(0) if fields else None,
    )


def total_curvature(terms: Iterable[tuple[str, EnergyTerm]], norm: Norm) -> Tensor | None:
    """L of all terms together; None if no term curves upwards."""
    found = [term.curvature(norm) for _, term in terms]
    bounds = [bound for bound in found if bound is not None]
    return torch.stack(bounds).sum() if bounds else None


def checked(energy: Tensor, planned: Planned, g: Tensor) -> Tensor:
    """With the field's part, if its shape is right."""
    if energy.shape != g.shape[:-1]:
        raise ValueError(
            f"term {planned.name!r}: energy has shape {tuple(energy.shape)}; it must have "
            f"(batch, tokens) = {tuple(g.shape[:-1])}"
        )
    field = planned.readout.field
    return energy if field is None else energy - g @ field
