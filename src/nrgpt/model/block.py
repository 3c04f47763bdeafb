"""One inference step, x <- block(x): the gradient of an energy, or a transformer block.

Every block has ``prepare``, called once per forward pass for what its steps share, and is then
called as ``block(x, t, prepared)``. The model's loop knows no more than this. Two things may be
added: ``masks``, one for each of the block's ``updates``, is what dropout multiplies them with;
with a ``cache``, x holds new tokens only, which see the earlier ones through their kept keys.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..decode.cache import Cache
from .config import ModelConfig
from .energy import FEEDFORWARD, AttentionEnergy, EnergyTerm, Readout, TotalEnergy
from .energy.total import Extra, read
from .norm import make_norm
from .rate import Rate, make_rate
from .transformer import ParallelBlock, SequentialBlock, dropped


class Folded(NamedTuple):
    """A term's weights for one forward pass, eta folded into the way back."""

    term: EnergyTerm
    readout: Readout
    write: Tensor  # eta R^T times the term's gain, (D, written rows)
    field: Tensor | None  # eta h, (D,)


class Stacked(list[Folded]):
    """The same, and all terms' weights as one readout and one way back: two products a step. For
    decoding, where so little is computed that the number of products is what counts."""

    def __init__(self, terms: list[Folded]):
        super().__init__(terms)
        weights, biases, _ = zip(*(term.readout for term in terms), strict=True)
        self.sizes = [len(weight) for weight in weights]
        self.read = torch.cat(weights)
        self.bias = None
        if any(bias is not None for bias in biases):
            self.bias = torch.cat(
                [
                    w.new_zeros(len(w)) if b is None else b
                    for w, b in zip(weights, biases, strict=True)
                ]
            )
        self.write = torch.cat([term.write for term in terms], dim=1)
        present = [term.field for term in terms if term.field is not None]
        self.field = torch.stack(present).sum(0) if present else None

    def adds_up(self, rate: Rate, x: Tensor) -> bool:
        """Whether a step is x plus one product, with nothing in between, in one precision."""
        is_mixed = torch.is_autocast_enabled(x.device.type)
        return rate.is_folded and self.field is None and not is_mixed


def stacked(terms: list[Folded]) -> list[Folded]:
    """Stacked, unless a term reads g itself: it has no weights."""
    has_weights = all(term.readout.weight is not None for term in terms)
    return Stacked(terms) if has_weights else terms


class EnergyBlock(nn.Module):
    """x <- x - eta dE/dg with g = norm(x).

    What tokens and steps share of eta is folded into one matrix eta R^T per forward pass: a step
    reads with R and writes with eta R^T. No autograd inside.
    """

    updates = 1

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm = make_norm(cfg, learn_gamma=cfg.learn_gamma, learn_delta=cfg.learn_delta)
        self.energy = TotalEnergy(
            {
                "attention": AttentionEnergy(cfg),
                "feedforward": FEEDFORWARD[cfg.feedforward](cfg),
            }
        )
        self.rate = make_rate(cfg)

    def prepare(self, extra: Extra | None = None) -> list[Folded]:
        return [self.fold(name, term) for name, term in self.energy.named_terms(extra)]

    def fold(self, name: str, term: EnergyTerm) -> Folded:
        R, _, h = readout = term.readout()
        if R is None:  # z is g: what is written back is eta itself
            some = next(self.parameters())
            back = torch.eye(self.rate.width, dtype=some.dtype, device=some.device)
        else:
            back = R[: term.written].T
        gain = term.gain()
        if gain is not None:
            back = back * gain
        field = None if h is None else self.rate.fold(h, self.norm, name)
        return Folded(term, readout, self.rate.fold(back, self.norm, name), field)

    def update(
        self, x: Tensor, t: int, prepared: list[Folded], cache: Cache | None = None
    ) -> Tensor:
        """-eta dE/dg at step t, shape (batch, tokens, D)."""
        if isinstance(prepared, Stacked):
            force = self.stacked_force(x, t, prepared, cache)
            update = F.linear(force, prepared.write, prepared.field)
            return self.rate.apply_step(update, t, x, self.norm)
        g = self.norm(x)
        update = torch.zeros_like(x)
        for slot, (term, readout, write, field) in enumerate(prepared):
            if cache is None:
                term.at_step(t)
                update = update + term.update(g, readout, write, field)
            else:
                force = self.force(term, read(readout, g), g, t, slot, cache)
                update = update + F.linear(force, write, field)
        return self.rate.apply_step(update, t, x, self.norm)

    def stacked_force(self, x: Tensor, t: int, prepared: Stacked, cache: Cache | None) -> Tensor:
        """The forces of all terms side by side."""
        g = self.norm(x)
        zs = F.linear(g, prepared.read, prepared.bias).split(prepared.sizes, dim=-1)
        forces = self.force(prepared[0].term, zs[0], g, t, 0, cache)
        for slot, z in enumerate(zs[1:], start=1):
            forces = self.force(prepared[slot].term, z, g, t, slot, cache, left=forces)
        return forces

    def force(
        self,
        term: EnergyTerm,
        z: Tensor,
        g: Tensor,
        t: int,
        slot: int,
        cache: Cache | None,
        left: Tensor | None = None,
    ) -> Tensor:
        """The bare force of a term, whose keys go into the cache if there is one; on the right of
        ``left``, if that is given."""
        term.at_step(t)
        keys = term.keys(z, g)
        kept = None if cache is None or keys is None else cache.put(t, slot, keys)
        if cache is None or keys is None or kept is None or cache.is_empty:
            # Nobody to look back at: each token alone, or the whole text at once.
            if left is not None:
                return term.bare_force_beside(left, z, keys)
            return term.bare_force(z, keys)
        assert cache.seen is not None
        force = term.bare_force_among(z, keys, kept, cache.seen)
        return force if left is None else torch.cat([left, force], dim=-1)

    def forward(
        self,
        x: Tensor,
        t: int,
        prepared: list[Folded],
        masks: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        if isinstance(prepared, Stacked) and masks is None and prepared.adds_up(self.rate, x):
            # One launch less: the product adds to x what it makes.
            force = self.stacked_force(x, t, prepared, cache)
            return torch.addmm(x.flatten(0, 1), force.flatten(0, 1), prepared.write.T).view_as(x)
        return x + dropped(self.update(x, t, prepared, cache), masks)

    def keep(self, x: Tensor, t: int, prepared: list[Folded], cache: Cache) -> None:
        """Let the cache hold the keys of x as those of step t."""
        g = self.norm(x)
        for slot, (term, readout, _, _) in enumerate(prepared):
            keys = term.keys(read(readout, g), g)
            if keys is not None:
                cache.put(t, slot, keys)


class Etas:
    """What all steps share of eta, as matrices for forces on g.

    By itself the block writes with eta R^T, and no step sees the force on g. Who wants to see it
    has eta applied to it: one product with a D x D matrix more (or one per term, if each has its
    own eta), where a force computed beside the step would take a second product with every R.
    """

    def __init__(self, block: EnergyBlock, terms: Sequence[str]):
        some = next(block.parameters())
        eye = torch.eye(block.rate.width, dtype=some.dtype, device=some.device)
        names = terms if block.rate.differs_by_term else terms[:1]
        self.matrices = [block.rate.fold(eye, block.norm, name) for name in names]

    def push(self, forces: Sequence[Tensor]) -> Tensor:
        """eta times the forces of the terms, summed."""
        if len(self.matrices) == 1:
            forces = [torch.stack(list(forces)).sum(0)]
        pairs = zip(forces, self.matrices, strict=True)
        return torch.stack([F.linear(force, eta) for force, eta in pairs]).sum(0)


def make_blocks(cfg: ModelConfig) -> nn.ModuleList:
    """The distinct blocks: one for every step of a GPT, a single one for the recurrent models."""
    match cfg.block:
        case "nrgpt":
            return nn.ModuleList([EnergyBlock(cfg)])
        case "gpt":
            return nn.ModuleList(SequentialBlock(cfg) for _ in range(cfg.steps))
        case "rgpt":
            return nn.ModuleList([SequentialBlock(cfg)])
        case "rgpt_parallel":
            return nn.ModuleList([ParallelBlock(cfg)])
