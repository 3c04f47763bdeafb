"""One inference step of an energy block: read out, force, write back.

    g = norm(x)
    z = read g + bias (+ drive)                              for each term
    y = x + sum over terms of eta (write^T force(z, past) + field)
    x <- y, or the nearest state to it in the cone           if the model is safeguarded

Terms with write weights of their own put ``move motion`` in the place of the force.

What the steps of a forward pass share is computed once, in a ``Plan``: eta is folded into the way
back, and the kernels are chosen. From then on ``move`` takes a step, and ``observe`` shows energies
and forces and says where a step would go (``energies`` alone are cheaper). Training, decoding,
trajectories, solvers and landscapes all go through these.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

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
from .past import Memory, Past, Settled, Shown, Still, WholeText
from .planned import Extra as Extra
from .planned import Fast, Observation, Planned, Stack, checked, stack_of, total_curvature
from .rate import Rate
from .safeguard import Cone


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
        settled: bool = False,
        safeguard: bool = False,
        margin: float = 0.0,
    ):
        """``like`` is any of the weights; ``safeguard`` keeps moves inside the cone."""
        self.norm, self.rate, self.like, self.settled = norm, rate, like, settled
        self.normalise = norm.function()
        self.kernels = kernels_for(like)
        terms = list(terms)
        self.cone: Cone | None = None
        if safeguard:
            self.cone = Cone(norm, total_curvature(terms, norm), margin)
        self.terms = [self.planned(name, term) for name, term in terms]
        is_one_sum = rate.is_folded or not rate.differs_by_term
        is_plain = self.cone is None and not settled and is_one_sum
        self.stack = stack_of(self.terms) if stacked and is_plain else None

    def planned(self, name: str, term: EnergyTerm) -> Planned:
        readout = term.readout()
        write = readout.read if readout.write is None else readout.write
        back, field = self.identity if write is None else write.mT, readout.field
        if readout.move is not None:
            back, field = self.rate.fold(readout.move, self.norm, name), None
        elif self.cone is None:  # or forces are needed as they are, and eta follows (see pushes)
            back = self.rate.fold(back, self.norm, name)
            field = None if field is None else self.rate.fold(field, self.norm, name)
        return Planned(name, term, readout, back, field, fast_path(term, readout, self.kernels))

    @property
    def identity(self) -> Tensor:
        return torch.eye(self.rate.width, dtype=self.like.dtype, device=self.like.device)

    # One step ----------------------------------------------------------------------------------

    def begin(self, x: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory | None]:
        """Where the steps start, and what they see."""
        return x, self.settle(x, memory) if self.settled else memory

    def settle(self, x: Tensor, memory: Memory | None = None) -> Settled:
        """What tokens that start in state x show and are driven by, at all steps."""
        g = self.normalise(x)
        pasts: list[Past] = []
        drives: list[Tensor | None] = []
        for slot, (_, term, readout, _, _, _) in enumerate(self.terms):
            shown = None
            if type(term).keys is not EnergyTerm.keys:
                z = readout.z(g) if readout.keys is None else F.linear(g, readout.keys)
                shown = term.keys(z, g)
            past = WholeText(None, shown) if memory is None else memory.past(None, slot, shown)
            pasts.append(past)
            drives.append(None if readout.drive is None else F.linear(g, readout.drive))
        return Settled(pasts, drives)

    def move(
        self,
        x: Tensor,
        t: int,
        memory: Memory | None = None,
        masks: Tensor | None = None,
    ) -> Tensor:
        """x after step t. Without a memory, x holds all tokens of a text; with one, tokens that
        see the others through their kept keys. ``masks`` are dropout's, (1, batch, tokens, D)."""
        g = self.normalise(x)
        force = None
        if self.cone is not None:
            parts, force = self.pushes(g, t, memory)
        elif self.stack is not None and memory is not None:
            stacked = self.stacked_force(self.stack, g, t, memory)
            is_mixed = torch.is_autocast_enabled(x.device.type)
            if self.rate.is_folded and self.stack.field is None and not is_mixed:
                back = self.stack.back.mT  # one launch less: the product adds to x what it makes
                return torch.addmm(x.flatten(0, 1), stacked.flatten(0, 1), back).view_as(x)
            parts = {"all": F.linear(stacked, self.stack.back, self.stack.field)}
        else:
            parts = {p.name: self.part(i, g, t, memory) for i, p in enumerate(self.terms)}
        if self.rate.is_folded:
            update = added(parts, x.dtype)
        else:
            update = self.rate.combined(parts, t, x, self.norm)
        y = x + (update if masks is None else update * masks[0])
        return y if self.cone is None or force is None else self.cone(x, y, force)

    def part(self, slot: int, g: Tensor, t: int, memory: Memory | None) -> Tensor:
        """One term's part of the update."""
        _, term, readout, back, field, fast = self.terms[slot]
        if memory is None and fast is not None:
            return fast.update(g, back, field)
        z, past = self.read(slot, g, t, memory)
        if readout.move is None:
            return F.linear(term.force(z, past), back, field)
        return F.linear(term.force_and_motion(z, past)[1], back)

    def pushes(self, g: Tensor, t: int, memory: Memory | None) -> tuple[dict[str, Tensor], Tensor]:
        """The parts of the update, and the force on g, which the cone needs."""
        forces, parts = {}, {}
        for slot, planned in enumerate(self.terms):
            forces[planned.name], part = self.push(slot, g, t, memory)
            if part is not None:
                parts[planned.name] = part
        return self.completed(parts, forces), added(forces, self.like.dtype)

    def push(
        self, slot: int, g: Tensor, t: int, memory: Memory | None
    ) -> tuple[Tensor, Tensor | None]:
        """A term's force on g and, if it has write weights of its own, its part of the update."""
        _, term, readout, back, _, _ = self.terms[slot]
        z, past = self.read(slot, g, t, memory)
        if readout.move is None:
            return readout.on_g(term.force(z, past)).to(self.like.dtype), None
        force, motion = term.force_and_motion(z, past)
        return readout.on_g(force).to(self.like.dtype), F.linear(motion, back)

    def completed(self, parts: dict[str, Tensor], forces: dict[str, Tensor]) -> dict[str, Tensor]:
        """``parts`` of the terms with write weights of their own, and eta times the forces of the
        others. (``move`` writes with eta write^T instead, and never sees the forces on g.)"""
        tied = {name: force for name, force in forces.items() if name not in parts}
        if tied and not self.rate.differs_by_term:
            tied = {next(iter(tied)): added(tied, self.like.dtype)}
        pushed = {
            name: self.rate.fold(force.flatten(0, 1).mT, self.norm, name).mT.view_as(force)
            for name, force in tied.items()
        }
        return parts | pushed

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

    def read(
        self, slot: int, g: Tensor, t: int | None, memory: Memory | None
    ) -> tuple[Tensor, Past]:
        """z of a term, and what its tokens see."""
        readout = self.terms[slot].readout
        z = readout.z(g)
        past = self.past(slot, z, g, t, memory)
        if readout.drive is not None:
            drive = self.still(memory).drive(slot)
            assert drive is not None
            z = z + drive
        return z, past

    def past(self, slot: int, z: Tensor, g: Tensor, t: int | None, memory: Memory | None) -> Past:
        """What tokens see that show the keys of z."""
        if self.settled:
            return self.still(memory).past(t, slot, None)
        shown = self.terms[slot].term.keys(z, g)
        return WholeText(t, shown) if memory is None else memory.past(t, slot, shown)

    def still(self, memory: Memory | None) -> Still:
        if memory is None:
            raise ValueError(
                "past = 'settled': tokens see keys that were made before the first step; pass what "
                "Plan.settle made of the state they started in"
            )
        return memory  # type: ignore[return-value]

    def shown(self, x: Tensor) -> list[Shown | None]:
        """What tokens in state x show to later ones, by slot."""
        g = self.normalise(x)
        return [planned.term.keys(planned.readout.z(g), g) for planned in self.terms]

    def keep(self, x: Tensor, t: int, memory: Memory) -> None:
        """Let the memory hold the keys of x as those of step t."""
        if self.settled:
            return  # they have been kept, for all steps
        for slot, shown in enumerate(self.shown(x)):
            memory.past(t, slot, shown)

    # The same, watched -------------------------------------------------------------------------

    def observe(self, x: Tensor, t: int, memory: Memory | None = None) -> Observation:
        """Energies and forces in state x, and what step t adds to it. Never in less precision than
        the weights have: a step changes an energy by little."""
        with torch.autocast(x.device.type, enabled=False):
            g = self.normalise(x)
            energies, forces, parts = {}, {}, {}
            for slot, planned in enumerate(self.terms):
                name, term, readout, back, _, _ = planned
                z, past = self.read(slot, g, t, memory)
                if readout.move is None:
                    energy, force = term.energy_and_force(z, past)
                else:
                    energy = term.energy(z, past)
                    force, motion = term.force_and_motion(z, past)
                    parts[name] = F.linear(motion, back)
                energies[name] = checked(energy, planned, g)
                forces[name] = readout.on_g(force)
            update = self.rate.combined(self.completed(parts, forces), t, x, self.norm)
            push = None
            if self.cone is not None:
                wanted = x + update
                kept = self.cone(x, wanted, added(forces, self.like.dtype))
                update, push = kept - x, (kept - wanted).norm(dim=-1)
        return Observation(g, energies, forces, update, push)

    def energies(
        self, x: Tensor, t: int | None = None, memory: Memory | None = None
    ) -> dict[str, Tensor]:
        """The energies alone, which is cheaper."""
        energies = {}
        with torch.autocast(x.device.type, enabled=False):
            g = self.normalise(x)
            for slot, planned in enumerate(self.terms):
                energy = planned.term.energy(*self.read(slot, g, t, memory))
                energies[planned.name] = checked(energy, planned, g)
        return energies


def added(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    first, *others = parts.values()
    return sum(others, first.to(dtype))


# Kernels ------------------------------------------------------------------------------------------


def fast_path(term: EnergyTerm, readout: Readout, kernels: Kernels) -> Fast | None:
    """By exact type: a subclass may have changed anything. Kernels know neither a settled past, nor
    drives, nor write weights of a term's own."""
    read, bias = readout.read, readout.bias
    if readout.move is not None or readout.drive is not None or getattr(term, "settled", False):
        return None
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
    g: Tensor,
    back: Tensor,
    field: Tensor | None,
) -> Tensor:
    z = F.linear(g, read)
    on_q = attend(z, term.heads, term.beta, strict=term.strict)
    return F.linear(on_q, back, field)


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
    g: Tensor,
    back: Tensor,
    field: Tensor | None,
) -> Tensor:
    if whole is not None:
        return whole(g, read, bias, back, field)
    return F.linear(force(F.linear(g, read, bias), activation), back, field)


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
