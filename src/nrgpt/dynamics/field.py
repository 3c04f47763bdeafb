"""The energy landscape that a token sees: energy, force and move among the keys of other tokens.

Earlier tokens act on a token through their keys alone. So some tokens can be computed while others
rest (their keys stay as they are), and a token can be tried at another place without anybody else
noticing. That takes the strict mask, B < A: a token that is its own key would notice itself.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..decode.cache import Seen
from ..model.block import Etas
from ..model.energy import AttentionEnergy, EnergyTerm, Readout
from ..model.energy.total import Extra, read
from ..model.network import LanguageModel


class Look(NamedTuple):
    g: Tensor
    energy: Tensor  # (batch, tokens), the sum of all terms
    force: Tensor  # -dE/dg, (batch, tokens, D)
    push: Tensor  # what all steps share of eta, times it


class Field:
    """The field of ``batch`` texts of ``tokens`` tokens each.

    ``aim`` says which tokens are being computed, ``commit`` shows their states to later tokens. If
    ``past`` is given, states (batch, tokens, D), all tokens are shown as they are there, for good.
    """

    def __init__(
        self,
        model: LanguageModel,
        batch: int,
        tokens: int,
        *,
        extra: Extra | None = None,
        past: Tensor | None = None,
    ):
        self.block = block = model.energy_block
        named = list(block.energy.named_terms(extra))
        self.terms = [(term, term.readout()) for _, term in named]
        self.etas = Etas(block, [name for name, _ in named])
        for term, _ in self.terms:
            if isinstance(term, AttentionEnergy) and term.mask != "strict":
                raise ValueError(
                    f"mask = {term.mask!r}: a token that is its own key has no field to move in; "
                    "this needs mask = 'strict'"
                )
        self.tokens = tokens
        self.kept: dict[int, Tensor] = {}
        self.everywhere = torch.arange(tokens, device=model.tokens.device).expand(batch, -1)
        self.aim(self.everywhere)
        self.is_fixed = False
        if past is not None:
            self.commit(past)
            self.is_fixed = True

    def aim(self, positions: Tensor) -> None:
        """Compute these tokens from now on, (batch, any number); the position ``tokens``, one
        behind the last, is for those that are there to fill a row."""
        self.seen = Seen(positions, self.tokens + 1)

    def at_step(self, t: int) -> None:
        """Step t begins: terms that change over the steps hear of it."""
        for term, _ in self.terms:
            term.at_step(t)

    def commit(self, x: Tensor) -> None:
        """Later tokens see the tokens aimed at as they are in x, from now on."""
        if self.is_fixed:
            return
        g = self.block.norm(x)
        for slot, (term, readout) in enumerate(self.terms):
            keys = term.keys(read(readout, g), g)
            if keys is None:
                continue
            if slot not in self.kept:
                batch, heads, _, size = keys.shape
                self.kept[slot] = keys.new_zeros(batch, heads, self.tokens + 1, size)
            self.kept[slot][self.seen.rows, :, self.seen.positions] = keys.transpose(1, 2)

    def look(self, x: Tensor) -> Look:
        """At the tokens aimed at, where they are in x."""
        g = self.block.norm(x)
        return look_among(self.terms, self.etas, g, lambda slot, _: self.kept[slot], self.seen)

    def energy(self, x: Tensor) -> Tensor:
        """Of the tokens aimed at, where they are in x: (batch, tokens). Cheaper than a look."""
        g = self.block.norm(x)
        energy = torch.zeros_like(g[..., 0])
        for slot, (term, readout) in enumerate(self.terms):
            z = read(readout, g)
            keys = term.keys(z, g)
            if keys is None:
                energy = energy + term.energy(z, None)
            else:
                energy = energy + term.energy_among(z, keys, self.kept[slot], self.seen)
            energy = energy if readout.field is None else energy - g @ readout.field
        return energy

    def move(self, look: Look, t: int, x: Tensor) -> Tensor:
        """-eta dE/dg at step t: what a plain step adds to x."""
        return self.block.rate.apply_step(look.push, t, x, self.block.norm)


def look_among(
    terms: Sequence[tuple[EnergyTerm, Readout]],
    etas: Etas,
    g: Tensor,
    kept: Callable[[int, Tensor], Tensor],
    seen: Seen,
) -> Look:
    """At tokens among kept keys: ``kept(number of the term, their own)`` gives those of all."""
    energy, forces = torch.zeros_like(g[..., 0]), []
    for slot, (term, readout) in enumerate(terms):
        R, _, h = readout
        z = read(readout, g)
        keys = term.keys(z, g)
        if keys is None:
            own, on_z = term.energy(z, None), term.force(z, None)
        else:
            others = kept(slot, keys)
            own = term.energy_among(z, keys, others, seen)
            on_z = term.force_among(z, keys, others, seen)
        energy = energy + own
        force = on_z if R is None else on_z @ R[: term.written]
        if h is not None:
            energy, force = energy - g @ h, force + h
        forces.append(force)
    return Look(g, energy, torch.stack(forces).sum(0), etas.push(forces))
