"""A neighbour of NRGPT: the Energy Transformer (Hoover et al. 2023), ``block="et"``.

One energy for the whole sequence, and all tokens roll down it together:

    E = sum_A E_A,  E_A = -(1/beta) sum_h alpha_h log sum_{B in S(A)} exp(beta k_hB . q_hA) + E^FF_A

A token acts as a query in its own E_A and as a key in those of the tokens that see it. With p the
softmax over B, the force on it has both parts:

    -dE/dg_A = W_Q^T sum_B p_AB k_B + W_K^T sum_C p_CA q_C + the force of E^FF_A   (alpha_h each).

Without the second part this is NRGPT's force, which is no gradient of any E. With it, tokens feel
later ones even where they only attend to earlier ones (``sight="earlier"``): no such model is
causal. So these models complete texts, and do not continue them.

Everything else is the energy block's: readouts, eta, norm, trajectories, FLOPs.
"""

from functools import partial

import torch
from torch import Tensor

from .block import EnergyBlock
from .certificate import Certificate, Finding, Guarantee
from .config import ModelConfig
from .curvature import bilinear_size
from .energy import AttentionEnergy, EnergyTerm
from .norm import Norm
from .past import Past
from .step import Extra, Plan


class SequenceAttention(AttentionEnergy):
    """The attention energy of a sequence: the force is minus the gradient of its sum."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.sight = cfg.sight
        self.own_key_moves = True  # z has queries and keys of all tokens, and both write

    def energy(self, z: Tensor, past: Past) -> Tensor:
        return self.energy_and_force(z, past)[0]

    def force(self, z: Tensor, past: Past) -> Tensor:
        return self.energy_and_force(z, past)[1]

    def energy_and_force(self, z: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        q, k, log_sum, p = self.look(z)
        on_q, on_k = p @ k, p.mT @ q
        if self.full:  # all heads share the key, so here alpha cannot wait for the way back
            alpha = self.strength()
            on_k = on_k if alpha is None else alpha[:, None, None].to(on_k.dtype) * on_k
            on_k = on_k.sum(1, keepdim=True)
        return self.summed(log_sum), torch.cat([self.merge(on_q), self.merge(on_k)], dim=-1)

    def look(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys (batch, heads, tokens, size), and for each query the logsumexp of its
        scores and their softmax p (.., tokens, tokens); zeros for a token that sees nothing."""
        q = self.query(z)
        k = z[..., self.queries :].unflatten(-1, (-1, self.size)).transpose(1, 2)
        unseen = ~seen_by(self.sight, z.shape[-2], z.device)
        blind = unseen.all(-1, keepdim=True)
        scores = (self.beta * (q @ k.mT)).masked_fill(unseen & ~blind, -torch.inf)
        p = scores.softmax(-1).masked_fill(blind, 0)
        return q, k, scores.logsumexp(-1).masked_fill(blind[:, 0], 0), p

    def received(self, z: Tensor) -> Tensor:
        """How much attention each token gets, c_hA = sum_C p_hCA: (batch, heads, tokens)."""
        return self.look(z)[3].sum(-2)

    def curvature(self, norm: Norm) -> Tensor | None:
        return None  # no number for all states: see curvature_of_tokens

    def guarantee(self) -> Finding:
        name = f"attention of the sequence, sight {self.sight}"
        if self.positive:
            why = "curves by what a token's keys receive, which the cone knows"
            return Finding(name, Guarantee.EVERY_STEP, why)
        return Finding(name, Guarantee.SMALL_STEPS, "not concave: keys move too")


def seen_by(sight: str, tokens: int, device: torch.device) -> Tensor:
    """Which tokens B each A attends to, (A, B)."""
    A, B = torch.arange(tokens, device=device)[:, None], torch.arange(tokens, device=device)
    match sight:
        case "others":
            return A != B
        case "earlier":
            return B < A
        case _:
            return torch.ones_like(A == B)


def curvature_of_tokens(
    term: SequenceAttention, norm: Norm, others: Tensor | None, x: Tensor
) -> Tensor:
    """L of each token in state x, (batch, tokens, 1): what the cone needs.

    -logsumexp is concave in the scores, and these are bilinear: with p as it is before the step,
    d_A the move of the normalised token, and J_h as the norm's gain leaves it,

        E(n') <= E(n) - f . d - sum_h alpha_h sum_AB p_hAB d_B^T J_h d_A
              <= E(n) - sum_A (f_A . d_A - L_A/2 |d_A|^2),  L_A = sum_h alpha_h |J_h| (1 + c_hA),

    by |d_A| |d_B| <= (|d_A|^2 + |d_B|^2) / 2, where c_hA is the attention that A receives. So it is
    enough that each token stays in the cone of its own L_A. On average over tokens, L_A is
    2 sum_h alpha_h |J_h|, however long the text. ``others`` is what terms of one token add.
    """
    with torch.autocast(x.device.type, enabled=False):
        read = term.readout().read
        assert read is not None
        received = term.received(norm(x).to(read.dtype) @ read.mT)
        L = torch.einsum("h,bhn->bn", head_sizes(term, norm), 1 + received)[..., None]
    return L if others is None else L + others


class SequenceBlock(EnergyBlock):
    """x <- x - eta dE/dg of all tokens at once."""

    def make_term(self, kind: str, cfg: ModelConfig) -> EnergyTerm:
        return SequenceAttention(cfg) if kind == "attention" else super().make_term(kind, cfg)

    def plan(
        self, extra: Extra | None = None, *, stacked: bool = False, is_free: bool = False
    ) -> Plan:
        plan = super().plan(extra, stacked=stacked, is_free=is_free)
        term = self.terms.get("attention")
        if plan.cone is not None and isinstance(term, SequenceAttention):
            others = plan.cone.curvature
            L = partial(curvature_of_tokens, term, self.norm, others)  # type: ignore[arg-type]
            plan.cone = plan.cone._replace(curvature=L)
        return plan

    def guarantees(self, extra: Extra | None = None) -> Certificate:
        found = super().guarantees(extra)
        others = [
            Finding(name, Guarantee.NONE, "its tokens feel no force as keys of others")
            for name, term in self.energy.named_terms(extra)
            if type(term).keys is not EnergyTerm.keys and not isinstance(term, SequenceAttention)
        ]
        return Certificate((*found.findings, *others), whole=True)


@torch.no_grad()
def head_sizes(term: SequenceAttention, norm: Norm) -> Tensor:
    """alpha_h |J_h|, where J_h joins normalised tokens."""
    sizes = bilinear_size(*(norm.through(M) for M in term.pairs()))
    alpha = term.strength()
    return sizes if alpha is None else alpha.to(sizes.dtype) * sizes
