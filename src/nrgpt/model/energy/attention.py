"""The attention energy."""

import torch
from torch import Tensor

from ..certificate import Finding, Guarantee
from ..config import ModelConfig
from ..init import constant, normal, parameter
from ..past import Past
from .term import EnergyTerm, Readout


class AttentionEnergy(EnergyTerm):
    """E_A = -(1/beta) sum_h alpha_h log sum_{B<A} exp(beta g_B^T J_h g_A), paper eq. E-AT.

    Low rank, J_h = W_K,h^T W_Q,h:  q = W_Q g and k = W_K g, both read out.
    Full rank:                      q_h = J_h g, and the keys are g itself, for all heads.

    Either way the score is q_A . k_B, and with p its softmax over B,

        -dE_A/dq_A = alpha sum_B p_B k_B:

    attention whose values are its keys; alpha is part of the way back. E_A depends on the token's
    own g through q alone, and logsumexp is convex, so E_A is concave in g_A where alpha >= 0.

    The sum over B is set by ``mask``:

    strict     B < A, the paper's. The first token has E = 0 and no force.
    inclusive  B <= A. Token A is now its own key too: -dE_A/dk_A = alpha p_A q_A, the extra
               (J + J^T) g_A of the exact gradient. No longer concave.
    released   B <= A with the force on q alone, which is what the authors' code does by default:
               the token's own key counts as a constant. That is not the gradient of this
               energy: for reproduction only.
    """

    alpha: Tensor | None

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.mask = cfg.mask
        self.strict = cfg.mask == "strict"
        self.heads = cfg.heads
        self.beta = cfg.score_scale
        self.full = cfg.coupling == "full"
        self.size = cfg.width if self.full else cfg.head_width  # of one query or key
        self.queries = cfg.heads * self.size  # leading rows of z; the rest are keys
        if self.full:
            self.J = parameter(cfg.heads, cfg.width, cfg.width, start=normal)
        else:
            self.W_Q = parameter(cfg.width, cfg.width, start=normal, muon="matrix")
            self.W_K = parameter(cfg.width, cfg.width, start=normal, muon="matrix")
        alpha = parameter(cfg.heads, start=constant(cfg.alpha_init)) if cfg.learn_alpha else None
        self.alpha = alpha

    def readout(self) -> Readout:
        if not self.full:
            read = torch.cat([self.W_Q, self.W_K])
            write = read if self.mask == "inclusive" else self.W_Q
            return Readout(read, write=self.weighted(write))
        J = self.J.flatten(0, 1)
        write = self.weighted(J)
        if self.mask != "inclusive":
            return Readout(J, write=write)
        eye = torch.eye(J.shape[1], dtype=J.dtype, device=J.device)  # g is read as a key as well
        return Readout(torch.cat([J, eye]), write=torch.cat([write, eye]))

    def keys(self, z: Tensor, g: Tensor) -> Tensor:
        if self.full:
            return g.unsqueeze(1)  # one set for all heads
        return self.split(z[..., self.queries :])

    def energy(self, z: Tensor, past: Past) -> Tensor:
        q = self.split(z[..., : self.queries])
        return self.summed(past.logsumexp(q, self.beta, strict=self.strict))

    def force(self, z: Tensor, past: Past) -> Tensor:
        q = self.split(z[..., : self.queries])
        on_q = past.attend(q, self.beta, strict=self.strict)
        if self.mask != "inclusive":
            return self.merge(on_q)
        return self.with_own_key(q, past, on_q, past.logsumexp(q, self.beta, strict=False))

    def energy_and_force(self, z: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """From one look at the scores, which is nearly all that either costs."""
        q = self.split(z[..., : self.queries])
        on_q, log_sum = past.attend_with_logsumexp(q, self.beta, strict=self.strict)
        if self.mask != "inclusive":
            return self.summed(log_sum), self.merge(on_q)
        return self.summed(log_sum), self.with_own_key(q, past, on_q, log_sum)

    def with_own_key(self, q: Tensor, past: Past, on_q: Tensor, log_sum: Tensor) -> Tensor:
        """The force on q, and beside it the one on the token's own key."""
        p_self = torch.exp(self.beta * (q * past.own).sum(-1) - log_sum)
        on_k = p_self.unsqueeze(-1) * q
        if not self.full:
            return torch.cat([self.merge(on_q), self.merge(on_k)], dim=-1)
        # All heads share the key, so here alpha cannot wait for the way back.
        on_k = on_k if self.alpha is None else self.alpha[:, None, None].to(on_k.dtype) * on_k
        return torch.cat([self.merge(on_q), on_k.sum(1)], dim=-1)

    def summed(self, log_sum: Tensor) -> Tensor:
        """The energy of logsumexps (batch, heads, tokens)."""
        if self.alpha is not None:
            log_sum = self.alpha[:, None].to(log_sum.dtype) * log_sum
        return -log_sum.sum(1) / self.beta

    def weighted(self, rows: Tensor) -> Tensor:
        """alpha_h times the rows of head h, of queries and, if they follow, of keys."""
        if self.alpha is None:
            return rows
        alpha = self.alpha.repeat_interleave(self.size)
        return (rows.mT * alpha.repeat(len(rows) // self.queries)).mT

    def split(self, z: Tensor) -> Tensor:
        """(batch, tokens, heads x size) -> (batch, heads, tokens, size)."""
        return z.unflatten(-1, (self.heads, self.size)).transpose(1, 2)

    def merge(self, z: Tensor) -> Tensor:
        return z.transpose(1, 2).flatten(-2)

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
