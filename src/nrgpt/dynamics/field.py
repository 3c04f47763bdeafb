"""The energy landscape that a token sees: its energy, force and next move among the keys of others.

Earlier tokens act on a token through their keys alone. So some tokens can be computed while others
rest, with their keys as they are, and a token can be tried elsewhere without any effect on the
others. This takes the strict mask, B < A: a token that is its own key would affect itself. Or a
settled past, where all keys were made before the first step: then this is the model's own field.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..decode.cache import Kept, Room, Seen, make_room, put
from ..model.energy import AttentionEnergy
from ..model.network import Network
from ..model.past import Past, Shown, WholeText
from ..model.step import Extra, Observation


class Field:
    """The field of texts that start in these states, (batch, tokens, D): ``model.begin(idx)``.

    ``aim`` chooses the tokens that are computed, ``commit`` shows their states to later tokens. If
    ``past`` is given, (batch, tokens, D), all tokens are seen in these states for good. A settled
    past is what it is, whatever is committed.
    """

    def __init__(
        self,
        model: Network,
        start: Tensor,
        *,
        extra: Extra | None = None,
        past: Tensor | None = None,
    ):
        batch, tokens = start.shape[:2]
        self.plan = model.energy_block.plan(extra)
        for _, term in model.energy_block.named_terms(extra):
            moves = isinstance(term, AttentionEnergy) and not term.strict and not term.settled
            if moves:
                raise ValueError(
                    f"mask = {term.mask!r}: a token that is its own key has no fixed field to move "
                    "in; this needs mask = 'strict' or past = 'settled'"
                )
        self.tokens = tokens
        self.kept: dict[int, Room] = {}
        self.everywhere = torch.arange(tokens, device=model.tokens.device).expand(batch, -1)
        self.aim(self.everywhere)
        self.is_fixed = False
        self.settled = None
        if self.plan.settled:
            with torch.autocast(start.device.type, enabled=False):
                self.settled = self.plan.settle(start, self)
        elif past is not None:
            self.commit(past)
        self.is_fixed = self.settled is not None or past is not None

    def aim(self, positions: Tensor) -> None:
        """Compute the tokens at these positions from now on, (batch, any number). Fillers, which
        make rows equally long, have the position ``tokens``, one past the last."""
        self.seen = Seen(positions, self.tokens + 1)

    def commit(self, x: Tensor) -> None:
        """From now on, later tokens see the tokens aimed at in state x."""
        if self.is_fixed:
            return
        with torch.autocast(x.device.type, enabled=False):  # as precise as what is observed
            shows = self.plan.shown(x)
        for slot, shown in enumerate(shows):
            if shown is not None:
                self.keep(slot, shown)

    def keep(self, slot: int, shown: Shown) -> None:
        """The keys of the tokens aimed at."""
        if slot not in self.kept:
            self.kept[slot] = make_room(shown, self.tokens + 1)
        news = shown if isinstance(shown, tuple) else (shown,)
        for old, new in zip(self.kept[slot], news, strict=True):
            put(old, new, self.seen.positions)

    def past(self, t: int | None, slot: int, shown: Shown | None) -> Past:
        """The committed keys, or those that have settled."""
        if self.plan.settled:
            if self.settled is None and shown is not None:  # they are being made
                self.keep(slot, shown)
            shown = self.kept[slot][0] if slot in self.kept else None
        if shown is None:
            return WholeText(t, None)
        return Kept(t, shown, self.kept[slot], self.seen)

    def drive(self, slot: int) -> Tensor | None:
        """Of the tokens aimed at."""
        assert self.settled is not None
        drive = self.settled.drives[slot]
        if drive is None:
            return None
        positions = self.seen.positions.clamp(max=self.tokens - 1)  # fillers may have any
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        return drive[rows, positions]

    def look(self, x: Tensor, t: int) -> Observation:
        """The tokens aimed at, in state x at step t."""
        return self.plan.observe(x, t, self)

    def energy(self, x: Tensor, t: int | None = None) -> Tensor:
        """Of the tokens aimed at, in state x: (batch, tokens). Cheaper than a look."""
        return torch.stack(list(self.plan.energies(x, t, self).values())).sum(0)

    def roll(self, x: Tensor, states: int, start: int = 0) -> Iterator[tuple[Tensor, Observation]]:
        """The model's own steps from x, the first of which is step ``start``: x itself and the
        states that follow, each with a look at it."""
        for t in range(start, start + states):
            self.commit(x)
            look = self.look(x, t)
            yield x, look
            x = x + look.update
