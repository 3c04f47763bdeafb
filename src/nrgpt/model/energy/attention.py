"""The attention energy."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...decode.cache import Seen
from ...kernels.attention import (
    attend,
    attend_kept,
    attend_read,
    attend_with_logsumexp,
    logsumexp_among,
    logsumexp_scores,
)
from ..certificate import Finding, Guarantee
from ..init import blank
from .term import EnergyTerm, Readout, read

if TYPE_CHECKING:
    from ..config import ModelConfig


class AttentionEnergy(EnergyTerm):
    """E_A = -(1/beta) sum_h alpha_h log sum_{B<A} exp(beta g_B^T J_h g_A), paper eq. E-AT.

    Low rank, J_h = W_K,h^T W_Q,h:  q = W_Q g and k = W_K g, both read out.
    Full rank:                      q_h = J_h g, and the keys are g itself, for all heads.

    Either way the score is q_A . k_B, and with p its softmax over B,

        -dE_A/dq_A = alpha sum_B p_B k_B:

    attention whose values are its keys. E_A depends on the token's own g through q alone, and
    logsumexp is convex, so E_A is concave in g_A where alpha >= 0.

    The sum over B is set by ``mask``:

    strict     B < A, the paper's. The first token has E = 0 and no force.
    inclusive  B <= A. Token A is now its own key too: -dE_A/dk_A = alpha p_A q_A, the extra
               (J + J^T) g_A of the exact gradient. No longer concave.
    released   B <= A with the force of q alone, which is what the authors' code does by default:
               the token's own key is taken for a constant. That is not the gradient of this
               energy: for reproduction only.
    """

    alpha: Tensor | None

    def __init__(self, cfg: "ModelConfig"):
        super().__init__()
        self.mask = cfg.mask
        self.heads = cfg.heads
        self.beta = cfg.score_scale
        self.full = cfg.coupling == "full"
        self.size = cfg.width if self.full else cfg.head_width  # of one query or key
        if self.full:
            self.J = blank(cfg.heads, cfg.width, cfg.width)
        else:
            self.W_Q = blank(cfg.width, cfg.width)
            self.W_K = blank(cfg.width, cfg.width)
        self.alpha = blank(cfg.heads) if cfg.learn_alpha else None
        self.queries = cfg.heads * self.size  # leading rows of z; the rest are keys
        self.written = None if self.mask == "inclusive" else self.queries

    def readout(self) -> Readout:
        if not self.full:
            return Readout(torch.cat([self.W_Q, self.W_K]))
        J = self.J.flatten(0, 1)
        if self.mask == "inclusive":  # the energy depends on g as a key: read it out as well
            J = torch.cat([J, torch.eye(J.shape[1], dtype=J.dtype, device=J.device)])
        return Readout(J)

    def keys(self, z: Tensor, g: Tensor) -> Tensor:
        if self.full:
            return g.unsqueeze(1)  # one set for all heads
        return self.split(z[..., self.queries :])

    def energy(self, z: Tensor, keys: Tensor | None) -> Tensor:
        assert keys is not None
        q = self.split(z[..., : self.queries])
        log_sum = logsumexp_scores(q, keys, self.beta, strict=self.mask == "strict")
        return -self.weighted(log_sum.unsqueeze(-1)).sum((1, 3)) / self.beta

    def energy_and_force(self, z: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """From one look at the scores, which is nearly all that either costs."""
        assert keys is not None
        q = self.split(z[..., : self.queries])
        on_q, log_sum = attend_with_logsumexp(q, keys, self.beta, strict=self.mask == "strict")
        energy = -self.weighted(log_sum.unsqueeze(-1)).sum((1, 3)) / self.beta
        if self.mask != "inclusive":
            return energy, self.gained(self.merge(on_q))
        return energy, self.with_own_key(q, keys, on_q, log_sum)

    def gain(self) -> Tensor | None:
        """alpha_h for each row of a head. (The force on own keys sums over heads: not with it.)"""
        if self.alpha is None or self.mask == "inclusive":
            return None
        return self.alpha.repeat_interleave(self.size)

    def force(self, z: Tensor, keys: Tensor | None) -> Tensor:
        return self.gained(self.bare_force(z, keys))

    def force_among(self, z: Tensor, keys: Tensor, kept: Tensor, seen: Seen) -> Tensor:
        return self.gained(self.bare_force_among(z, keys, kept, seen))

    def gained(self, force: Tensor) -> Tensor:
        gain = self.gain()
        return force if gain is None else force * gain.to(force.dtype)

    def bare_force(self, z: Tensor, keys: Tensor | None) -> Tensor:
        assert keys is not None
        q = self.split(z[..., : self.queries])
        on_q = attend(q, keys, self.beta, strict=self.mask == "strict")
        if self.mask != "inclusive":
            return self.merge(on_q)
        return self.with_own_key(q, keys, on_q, logsumexp_scores(q, keys, self.beta, strict=False))

    def bare_force_among(self, z: Tensor, keys: Tensor, kept: Tensor, seen: Seen) -> Tensor:
        q = self.split(z[..., : self.queries])
        on_q = attend_kept(q, kept, seen, self.beta, strict=self.mask == "strict")
        if self.mask != "inclusive":
            return self.merge(on_q)
        kept, mask = seen.window(kept, strict=False)
        return self.with_own_key(q, keys, on_q, logsumexp_among(q, kept, self.beta, mask))

    def energy_among(self, z: Tensor, keys: Tensor, kept: Tensor, seen: Seen) -> Tensor:
        q = self.split(z[..., : self.queries])
        kept, mask = seen.window(kept, strict=self.mask == "strict")
        log_sum = logsumexp_among(q, kept, self.beta, mask)
        return -self.weighted(log_sum.unsqueeze(-1)).sum((1, 3)) / self.beta

    def update(self, g: Tensor, readout: Readout, write: Tensor, field: Tensor | None) -> Tensor:
        """Low rank, all that ``bare_force`` asks for is in z, and need not be taken apart. (A
        subclass may have changed what is.)"""
        used = ("bare_force", "keys", "split", "merge")
        is_own = all(getattr(type(self), name) is getattr(AttentionEnergy, name) for name in used)
        if self.full or self.mask == "inclusive" or not is_own:
            return super().update(g, readout, write, field)
        z = read(readout, g)
        on_q = attend_read(z, self.heads, self.beta, strict=self.mask == "strict")
        return F.linear(on_q, write, field)

    def with_own_key(self, q: Tensor, keys: Tensor, on_q: Tensor, log_sum: Tensor) -> Tensor:
        """The force on q, and beside it the one on the token's own key."""
        p_self = torch.exp(self.beta * (q * keys).sum(-1) - log_sum)
        on_k = self.weighted(p_self.unsqueeze(-1) * q)
        on_k = on_k.sum(1) if self.full else self.merge(on_k)
        return torch.cat([self.merge(self.weighted(on_q)), on_k], dim=-1)

    def split(self, z: Tensor) -> Tensor:
        """(batch, tokens, heads x size) -> (batch, heads, tokens, size)."""
        return z.unflatten(-1, (self.heads, self.size)).transpose(1, 2)

    def merge(self, z: Tensor) -> Tensor:
        return z.transpose(1, 2).flatten(-2)

    def weighted(self, per_head: Tensor) -> Tensor:
        """alpha_h times something of shape (batch, heads, tokens, size)."""
        if self.alpha is None:
            return per_head
        return self.alpha.to(per_head.dtype)[:, None, None] * per_head

    def guarantee(self) -> Finding:
        name = f"attention, {self.mask} mask"
        if self.mask == "released":
            return Finding(name, Guarantee.NONE, "its update is not the gradient of its energy")
        if self.mask == "inclusive":
            why = "a token that is its own key has an energy that is not concave"
            return Finding(name, Guarantee.SMALL_STEPS, why)
        if self.alpha is not None and not bool((self.alpha >= 0).all()):
            return Finding(name, Guarantee.SMALL_STEPS, "not concave: a head lacks alpha >= 0")
        return Finding(name, Guarantee.EVERY_STEP, "concave: minus a logsumexp, alpha >= 0")
