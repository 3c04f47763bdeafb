"""The sum of energy terms, by name."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from .term import EnergyTerm, read

Extra = Mapping[str, EnergyTerm]


class TotalEnergy(nn.Module):
    """E_A = sum of the terms' E_A. ``extra`` terms join for one call: regularisers, probes."""

    def __init__(self, terms: Extra):
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
            yield name, term

    def energies(self, g: Tensor, extra: Extra | None = None) -> dict[str, Tensor]:
        """Each term's energy of each token, shape (batch, tokens).

        Never in less precision than the weights have: a step changes an energy by little.
        """
        energies = {}
        with torch.autocast(g.device.type, enabled=False):
            for name, term in self.named_terms(extra):
                readout = term.readout()
                z = read(readout, g)
                energy = term.energy(z, term.keys(z, g))
                if energy.shape != g.shape[:-1]:
                    raise ValueError(
                        f"term {name!r}: energy has shape {tuple(energy.shape)}; it must have "
                        f"(batch, tokens) = {tuple(g.shape[:-1])}"
                    )
                energies[name] = energy if readout.field is None else energy - g @ readout.field
        return energies

    def forces(self, g: Tensor, extra: Extra | None = None) -> dict[str, Tensor]:
        """Each term's -dE_A/dg_A, shape (batch, tokens, D)."""
        forces = {}
        for name, term in self.named_terms(extra):
            R, _, h = readout = term.readout()
            z = read(readout, g)
            force = term.force(z, term.keys(z, g))
            force = force if R is None else force @ R[: term.written]
            forces[name] = force if h is None else force + h
        return forces
