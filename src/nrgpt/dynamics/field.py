"""The energy landscape that a token sees: energy, force and move among the keys of other tokens.

Earlier tokens act on a token through their keys alone. So some tokens can be computed while others
rest (their keys stay as they are), and a token can be tried at another place without anybody else
noticing. That takes the strict mask, B < A: a token that is its own key would notice itself.
"""

import torch
from torch import Tensor

from ..decode.cache import Kept, Seen, put
from ..model.energy import AttentionEnergy
from ..model.network import Network
from ..model.past import Past, Shown, WholeText
from ..model.step import Extra, Observation


class Field:
    """The field of ``batch`` texts of ``tokens`` tokens each.

    ``aim`` says which tokens are being computed, ``commit`` shows their states to later tokens. If
    ``past`` is given, states (batch, tokens, D), all tokens are shown as they are there, for good.
    """

    def __init__(
        self,
        model: Network,
        batch: int,
        tokens: int,
        *,
        extra: Extra | None = None,
        past: Tensor | None = None,
    ):
        self.plan = model.energy_block.plan(extra)
        for _, term in model.energy_block.named_terms(extra):
            if isinstance(term, AttentionEnergy) and not term.strict:
                raise ValueError(
                    f"mask = {term.mask!r}: a token that is its own key has no field to move in; "
                    "this needs mask = 'strict'"
                )
        self.tokens = tokens
        self.kept: dict[int, Shown] = {}
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

    def commit(self, x: Tensor) -> None:
        """Later tokens see the tokens aimed at as they are in x, from now on."""
        if self.is_fixed:
            return
        for slot, shown in enumerate(self.plan.shown(x)):
            if shown is None:
                continue
            both = shown if isinstance(shown, tuple) else (shown,)
            if slot not in self.kept:
                new = [k.new_zeros(*k.shape[:2], self.tokens + 1, k.shape[3]) for k in both]
                self.kept[slot] = (new[0], new[1]) if len(new) == 2 else new[0]
            kept = self.kept[slot]
            for old, keys in zip(kept if isinstance(kept, tuple) else (kept,), both, strict=True):
                put(old, keys, self.seen.positions)

    def past(self, t: int | None, slot: int, shown: Shown | None) -> Past:
        """Among the keys as they were committed."""
        if shown is None:
            return WholeText(t, None)
        return Kept(t, shown, self.kept[slot], self.seen)

    def look(self, x: Tensor, t: int) -> Observation:
        """At the tokens aimed at, where they are in x at step t."""
        return self.plan.observe(x, t, self)

    def energy(self, x: Tensor, t: int | None = None) -> Tensor:
        """Of the tokens aimed at, where they are in x: (batch, tokens). Cheaper than a look."""
        return torch.stack(list(self.plan.energies(x, t, self).values())).sum(0)
