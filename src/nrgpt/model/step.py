"""One inference step of an energy block: read out, force, write back.

    g = norm(x)
    z = read g + bias                                        for each term
    x <- x + sum over terms of eta (write^T force(z, past) + field)

What the steps of a forward pass share is computed once, in a ``Plan``: eta is folded into the way
back, and the kernels are chosen. From then on ``move`` takes a step, and ``observe`` shows energies
and forces and says where a step would go (``energies`` alone are cheaper). Training, decoding,
trajectories, solvers and landscapes all go through these.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention import attend_read
from ..kernels.dispatch import FLASH_SIZE, FUSED_WIDTH, SMALL_HEAD, Kernels, kernels_for
from ..kernels.feedforward import elementwise, feedforward, force_beside
from ..kernels.plain import plain_attend_read
from .energy.attention import AttentionEnergy
from .energy.feedforward import FF1, FF2W
from .energy.term import EnergyTerm, Readout
from .norm import Norm
from .past import Memory, Past, Shown, WholeText
from .rate import Rate
from .safeguard import cone

Extra = Mapping[str, EnergyTerm]
"""Terms that join a model's own for one call, by name."""


class Planned(NamedTuple):
    """A term and its weights for one forward pass."""

    name: str
    term: EnergyTerm
    readout: Readout
    back: Tensor
    """eta write^T, (D, n)."""
    field: Tensor | None
    """eta field, (D,)."""
    fast: "Fast | None"
    """How a kernel computes the same; None: by the contract's methods."""


class Fast(NamedTuple):
    """Shorter ways to what the contract says, for the terms that have one."""

    update: Callable[[Planned, Tensor], Tensor]
    """The term's part of a step, for a whole text."""
    force: Callable[[Tensor | None, Tensor, Callable[[Tensor], Past]], Tensor]
    """``force(left, z, past)``: the force on the right of those of other terms, for tokens among
    kept keys; ``past`` is a function of their own."""


def fast_path(term: EnergyTerm, readout: Readout, kernels: Kernels) -> Fast | None:
    """By exact type: a subclass may have changed anything."""
    read, bias, _, _ = readout
    is_narrow = type(term) is AttentionEnergy and term.size <= FLASH_SIZE
    if type(term) is AttentionEnergy and is_narrow and not term.full and term.mask != "inclusive":
        assert read is not None
        attend = attend_read if kernels.small and term.size <= SMALL_HEAD else plain_attend_read
        return Fast(partial(attention_update, term, attend, read), partial(attention_force, term))
    if type(term) is not FF1 and type(term) is not FF2W:
        return None
    assert read is not None
    pair = type(term) is FF2W
    beside = partial(force_beside, pair=pair) if kernels.elementwise else None
    force = elementwise(kernels.elementwise, pair=pair)
    is_small = kernels.small and term.width <= FUSED_WIDTH
    whole = partial(feedforward, activation=term.activation, pair=pair) if is_small else None
    return Fast(
        partial(feedforward_update, term.activation, force, whole, read, bias),
        partial(feedforward_force, term.activation, force, beside),
    )


def attention_update(
    term: AttentionEnergy,
    attend: Callable[..., Tensor],
    read: Tensor,
    planned: Planned,
    g: Tensor,
) -> Tensor:
    z = F.linear(g, read)
    on_q = attend(z, term.heads, term.beta, strict=term.strict)
    return F.linear(on_q, planned.back, planned.field)


def attention_force(
    term: AttentionEnergy, left: Tensor | None, z: Tensor, past: Callable[[Tensor], Past]
) -> Tensor:
    q, k = z.unflatten(-1, (2, term.heads, term.size)).permute(2, 0, 3, 1, 4).unbind(0)
    on_q = past(k).attend(q, term.beta, strict=term.strict).transpose(1, 2).flatten(-2)
    return on_q if left is None else torch.cat([left, on_q], dim=-1)


def feedforward_update(
    activation: str,
    force: Callable[[Tensor, str], Tensor],
    whole: Callable[..., Tensor] | None,
    read: Tensor,
    bias: Tensor | None,
    planned: Planned,
    g: Tensor,
) -> Tensor:
    if whole is not None:
        return whole(g, read, bias, planned.back, planned.field)
    return F.linear(force(F.linear(g, read, bias), activation), planned.back, planned.field)


def feedforward_force(
    activation: str,
    force: Callable[[Tensor, str], Tensor],
    beside: Callable[..., Tensor] | None,
    left: Tensor | None,
    z: Tensor,
    past: Callable[[Tensor], Past],
) -> Tensor:
    if beside is not None:
        return beside(left, z, activation)
    on_z = force(z, activation)
    return on_z if left is None else torch.cat([left, on_z], dim=-1)


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
    term; ``update`` is what a step adds to x."""

    g: Tensor
    energies: dict[str, Tensor]
    forces: dict[str, Tensor]
    update: Tensor

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
        return Observation(self.g[rows, columns], energies, forces, self.update[rows, columns])


class Plan:
    """The steps of a block in one forward pass. ``stacked`` is for decoding."""

    def __init__(
        self,
        norm: Norm,
        rate: Rate,
        terms: Iterable[tuple[str, EnergyTerm]],
        *,
        like: Tensor,
        stacked: bool = False,
        safeguard: bool = False,
    ):
        """``like`` is any of the weights; ``safeguard`` keeps moves inside the cone."""
        self.norm, self.rate, self.like, self.safeguard = norm, rate, like, safeguard
        self.normalise = norm.function()
        self.kernels = kernels_for(like)
        self.terms = [self.planned(name, term) for name, term in terms]
        self.stack = self.stacked() if stacked and not safeguard else None

    def planned(self, name: str, term: EnergyTerm) -> Planned:
        readout = term.readout()
        write = readout.read if readout.write is None else readout.write
        back, field = self.identity if write is None else write.mT, readout.field
        if not self.safeguard:  # or forces are needed as they are, and eta follows (see push)
            back = self.rate.fold(back, self.norm, name)
            field = None if field is None else self.rate.fold(field, self.norm, name)
        return Planned(name, term, readout, back, field, fast_path(term, readout, self.kernels))

    def stacked(self) -> Stack | None:
        """None if a term reads g itself: it has no weights to stack."""
        reads, biases, sizes = [], [], []
        for _, _, readout, _, _, _ in self.terms:
            if readout.read is None:
                return None
            rows = len(readout.read)
            none = readout.read.new_zeros(rows)
            reads.append(readout.read)
            biases.append(none if readout.bias is None else readout.bias)
            sizes.append(rows)
        has_bias = any(planned.readout.bias is not None for planned in self.terms)
        fields = [planned.field for planned in self.terms if planned.field is not None]
        return Stack(
            torch.cat(reads),
            torch.cat(biases) if has_bias else None,
            sizes,
            torch.cat([planned.back for planned in self.terms], dim=1),
            torch.stack(fields).sum(0) if fields else None,
        )

    @property
    def identity(self) -> Tensor:
        return torch.eye(self.rate.width, dtype=self.like.dtype, device=self.like.device)

    # One step ----------------------------------------------------------------------------------

    def move(
        self,
        x: Tensor,
        t: int,
        memory: Memory | None = None,
        masks: Tensor | None = None,
    ) -> Tensor:
        """x after step t. Without a memory, x holds all tokens of a text; with one, tokens that
        see the others through their kept keys. ``masks`` are dropout's, (1, batch, tokens, D)."""
        if self.safeguard:
            return self.safeguarded(x, t, memory, masks)
        g = self.normalise(x)
        if self.stack is not None and memory is not None:
            force = self.stacked_force(self.stack, g, t, memory)
            is_mixed = torch.is_autocast_enabled(x.device.type)
            if self.rate.is_folded and self.stack.field is None and not is_mixed:
                back = self.stack.back.mT  # one launch less: the product adds to x what it makes
                return torch.addmm(x.flatten(0, 1), force.flatten(0, 1), back).view_as(x)
            update = F.linear(force, self.stack.back, self.stack.field)
        else:
            parts = [self.part(slot, g, t, memory) for slot in range(len(self.terms))]
            update = parts[0].to(x.dtype)
            for part in parts[1:]:
                update = update + part
        if not self.rate.is_folded:
            update = self.rate.apply_step(update, t, x, self.norm)
        return x + (update if masks is None else update * masks[0])

    def safeguarded(self, x: Tensor, t: int, memory: Memory | None, masks: Tensor | None) -> Tensor:
        """``move`` with the force on g at hand, which the cone needs."""
        g = self.normalise(x)
        slots = range(len(self.terms))
        forces = [self.force_on_g(slot, g, t, memory).to(x.dtype) for slot in slots]
        update = self.rate.apply_step(self.push(forces), t, x, self.norm)
        y = x + (update if masks is None else update * masks[0])
        return cone(self.norm, x, y, torch.stack(forces).sum(0))

    def force_on_g(self, slot: int, g: Tensor, t: int, memory: Memory | None) -> Tensor:
        readout = self.terms[slot].readout
        z = readout.z(g)
        return readout.on_g(self.terms[slot].term.force(z, self.past(slot, z, g, t, memory)))

    def part(self, slot: int, g: Tensor, t: int, memory: Memory | None) -> Tensor:
        """One term's part of the update."""
        planned = self.terms[slot]
        if memory is None and planned.fast is not None:
            return planned.fast.update(planned, g)
        z = planned.readout.z(g)
        force = planned.term.force(z, self.past(slot, z, g, t, memory))
        return F.linear(force, planned.back, planned.field)

    def stacked_force(self, stack: Stack, g: Tensor, t: int, memory: Memory) -> Tensor:
        """The forces of all terms, side by side."""
        forces = None
        parts = F.linear(g, stack.read, stack.bias).split(stack.sizes, dim=-1)
        for slot, (planned, z) in enumerate(zip(self.terms, parts, strict=True)):
            if planned.fast is not None:
                past = partial(memory.past, t, slot)
                forces = planned.fast.force(forces, z, past)
            else:
                force = planned.term.force(z, self.past(slot, z, g, t, memory))
                forces = force if forces is None else torch.cat([forces, force], dim=-1)
        assert forces is not None
        return forces

    def past(self, slot: int, z: Tensor, g: Tensor, t: int | None, memory: Memory | None) -> Past:
        """What tokens see that show the keys of z."""
        shown = self.terms[slot].term.keys(z, g)
        return WholeText(t, shown) if memory is None else memory.past(t, slot, shown)

    def shown(self, x: Tensor) -> list[Shown | None]:
        """What tokens in state x show to later ones, by slot."""
        g = self.normalise(x)
        return [planned.term.keys(planned.readout.z(g), g) for planned in self.terms]

    def keep(self, x: Tensor, t: int, memory: Memory) -> None:
        """Let the memory hold the keys of x as those of step t."""
        for slot, shown in enumerate(self.shown(x)):
            memory.past(t, slot, shown)

    # The same, watched -------------------------------------------------------------------------

    def observe(self, x: Tensor, t: int, memory: Memory | None = None) -> Observation:
        """Energies and forces in state x, and what step t adds to it. Never in less precision than
        the weights have: a step changes an energy by little."""
        with torch.autocast(x.device.type, enabled=False):
            g = self.normalise(x)
            energies, forces = {}, {}
            for slot, planned in enumerate(self.terms):
                z = planned.readout.z(g)
                past = self.past(slot, z, g, t, memory)
                energy, force = planned.term.energy_and_force(z, past)
                energies[planned.name] = checked(energy, planned, g)
                forces[planned.name] = planned.readout.on_g(force)
            update = self.rate.apply_step(self.push(list(forces.values())), t, x, self.norm)
            seen = Observation(g, energies, forces, update)
            if self.safeguard:
                seen = seen._replace(update=cone(self.norm, x, x + update, seen.force) - x)
        return seen

    def energies(
        self, x: Tensor, t: int | None = None, memory: Memory | None = None
    ) -> dict[str, Tensor]:
        """The energies alone, which is cheaper."""
        energies = {}
        with torch.autocast(x.device.type, enabled=False):
            g = self.normalise(x)
            for slot, planned in enumerate(self.terms):
                z = planned.readout.z(g)
                energy = planned.term.energy(z, self.past(slot, z, g, t, memory))
                energies[planned.name] = checked(energy, planned, g)
        return energies

    def push(self, forces: list[Tensor]) -> Tensor:
        """What all steps share of eta times the forces on g, summed. (``move`` writes with
        eta write^T instead, and never sees the forces on g.)"""
        if not self.rate.differs_by_term:
            forces = [torch.stack(forces).sum(0)]
        pushed = [
            self.rate.fold(force.flatten(0, 1).mT, self.norm, planned.name).mT.view_as(force)
            for force, planned in zip(forces, self.terms, strict=False)
        ]
        return torch.stack(pushed).sum(0)


def checked(energy: Tensor, planned: Planned, g: Tensor) -> Tensor:
    """With the field's part, if its shape is right."""
    if energy.shape != g.shape[:-1]:
        raise ValueError(
            f"term {planned.name!r}: energy has shape {tuple(energy.shape)}; it must have "
            f"(batch, tokens) = {tuple(g.shape[:-1])}"
        )
    field = planned.readout.field
    return energy if field is None else energy - g @ field
