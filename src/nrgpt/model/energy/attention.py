"""The attention energy."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..certificate import Finding, Guarantee
from ..config import ModelConfig
from ..curvature import bilinear_norms
from ..init import constant, normal, parameter, softplus_root
from ..norm import Norm
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

    Where the past is settled, keys are made before the first step, a token's own among them. They
    are constants then, and the energy is concave under the inclusive mask too.

    With ``write="free"`` a token shows values v = W_V g beside its keys, and attention moves it by
    W_P sum_B p_B v_B instead of the force. To the past, [k | v] is one longer key, and q is filled
    up with zeros: the same scores, and one softmax for both sums.
    """

    alpha: Tensor | None

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.mask = cfg.mask
        self.strict = cfg.mask == "strict"
        self.settled = cfg.past == "settled"
        self.free = cfg.write == "free"
        self.own_key_moves = cfg.mask == "inclusive" and not self.settled
        self.heads = cfg.heads
        self.beta = cfg.score_scale
        self.full = cfg.coupling == "full"
        self.size = cfg.width if self.full else cfg.head_width  # of one query or key
        self.queries = cfg.heads * self.size  # leading rows of z; the rest are keys
        D = cfg.width
        if self.full:
            self.J = parameter(cfg.heads, D, D, start=normal)
        else:
            self.W_Q = parameter(D, D, start=normal, muon="matrix")
            self.W_K = parameter(D, D, start=normal, muon="matrix")
        if self.free:
            self.W_V = parameter(D, D, start=normal, muon="matrix")
            self.W_P = parameter(D, D, start=normal, muon="matrix")
        if cfg.drive:
            self.W_drive = parameter(self.queries, D, start=normal, muon="matrix")
        self.driven = cfg.drive
        self.positive = cfg.safeguard == "cone"
        start = softplus_root(cfg.alpha_init) if self.positive else constant(cfg.alpha_init)
        asked = self.positive or not self.free  # with free writes, only the cone asks for energies
        self.alpha = parameter(cfg.heads, start=start, learn=asked) if cfg.learn_alpha else None

    def readout(self) -> Readout:
        drive = self.W_drive if self.driven else None
        move = self.W_P if self.free else None
        if not self.full:
            read = self.W_Q if self.settled else torch.cat([self.W_Q, self.key_rows()])
            write = torch.cat([self.W_Q, self.W_K]) if self.own_key_moves else self.W_Q
            keys = self.key_rows() if self.settled else None
            return Readout(read, None, self.weighted(write), None, drive, move, keys)
        J = self.J.flatten(0, 1)
        write = self.weighted(J)
        if not self.own_key_moves:
            keys = J[:0] if self.settled else None  # they are g itself: nothing is read
            return Readout(J, write=write, drive=drive, keys=keys)
        eye = torch.eye(J.shape[1], dtype=J.dtype, device=J.device)  # g is read as a key as well
        return Readout(torch.cat([J, eye]), write=torch.cat([write, eye]))

    def key_rows(self) -> Tensor:
        """What keys are read with; values follow the keys of each head."""
        if not self.free:
            return self.W_K
        both = (W.unflatten(0, (self.heads, -1)) for W in (self.W_K, self.W_V))
        return torch.cat(tuple(both), dim=1).flatten(0, 1)

    def keys(self, z: Tensor, g: Tensor) -> Tensor:
        if self.full:
            return g.unsqueeze(1)  # one set for all heads
        read = z if self.settled else z[..., self.queries :]
        return read.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def query(self, z: Tensor) -> Tensor:
        """As long as a key."""
        q = self.split(z[..., : self.queries])
        return F.pad(q, (0, self.size)) if self.free else q

    def energy(self, z: Tensor, past: Past) -> Tensor:
        return self.summed(past.logsumexp(self.query(z), self.beta, strict=self.strict))

    def force(self, z: Tensor, past: Past) -> Tensor:
        q = self.query(z)
        on_q = past.attend(q, self.beta, strict=self.strict)[..., : self.size]
        if not self.own_key_moves:
            return self.merge(on_q)
        return self.with_own_key(q, past, on_q, past.logsumexp(q, self.beta, strict=False))

    def energy_and_force(self, z: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """From one look at the scores, which is nearly all that either costs."""
        q = self.query(z)
        on_q, log_sum = past.attend_with_logsumexp(q, self.beta, strict=self.strict)
        on_q = on_q[..., : self.size]
        if not self.own_key_moves:
            return self.summed(log_sum), self.merge(on_q)
        return self.summed(log_sum), self.with_own_key(q, past, on_q, log_sum)

    def force_and_motion(self, z: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        q = self.query(z)
        on_q, values = past.attend(q, self.beta, strict=self.strict).split(self.size, dim=-1)
        if not self.own_key_moves:
            return self.merge(on_q), self.merge(values)
        log_sum = past.logsumexp(q, self.beta, strict=False)
        return self.with_own_key(q, past, on_q, log_sum), self.merge(values)

    def with_own_key(self, q: Tensor, past: Past, on_q: Tensor, log_sum: Tensor) -> Tensor:
        """The force on q, and beside it the one on the token's own key."""
        p_self = torch.exp(self.beta * (q * past.own).sum(-1) - log_sum)
        on_k = p_self.unsqueeze(-1) * q[..., : self.size]
        if not self.full:
            return torch.cat([self.merge(on_q), self.merge(on_k)], dim=-1)
        # All heads share the key, so here alpha cannot wait for the way back.
        alpha = self.strength()
        on_k = on_k if alpha is None else alpha[:, None, None].to(on_k.dtype) * on_k
        return torch.cat([self.merge(on_q), on_k.sum(1)], dim=-1)

    def strength(self) -> Tensor | None:
        """alpha; None where it is 1."""
        return F.softplus(self.alpha) if self.positive and self.alpha is not None else self.alpha

    def summed(self, log_sum: Tensor) -> Tensor:
        """The energy of logsumexps (batch, heads, tokens)."""
        if (alpha := self.strength()) is not None:
            log_sum = alpha[:, None].to(log_sum.dtype) * log_sum
        return -log_sum.sum(1) / self.beta

    def weighted(self, rows: Tensor) -> Tensor:
        """alpha_h times the rows of head h, of queries and, if they follow, of keys."""
        if (alpha := self.strength()) is None:
            return rows
        alpha = alpha.repeat_interleave(self.size)
        return (rows.mT * alpha.repeat(len(rows) // self.queries)).mT

    def split(self, z: Tensor) -> Tensor:
        """(batch, tokens, heads x size) -> (batch, heads, tokens, size)."""
        return z.unflatten(-1, (self.heads, self.size)).transpose(1, 2)

    def merge(self, z: Tensor) -> Tensor:
        return z.transpose(1, 2).flatten(-2)

    def curvature(self, norm: Norm) -> Tensor | None:
        """Of a token that is its own key: its score g^T J_h g curves, all others are linear in g
        and a logsumexp adds no curvature upwards. So L = sum_h alpha_h max(0, -lowest eigenvalue of
        Gamma (J_h + J_h^T) Gamma)."""
        if not self.own_key_moves:
            return None
        size = bilinear_norms(*(norm.through(M) for M in self.pairs()))
        alpha = self.strength()
        return (size if alpha is None else alpha * size).sum()

    def pairs(self) -> tuple[Tensor, Tensor]:
        """A_h and B_h with J_h = A_h^T B_h, (heads, rows, D)."""
        if self.full:
            return torch.eye(self.size).to(self.J).expand_as(self.J), self.J
        return tuple(W.unflatten(0, (self.heads, -1)) for W in (self.W_K, self.W_Q))

    def guarantee(self) -> Finding:
        name = f"attention, {self.mask} mask"
        if self.mask == "released":
            return Finding(name, Guarantee.NONE, "its update is not the gradient of its energy")
        if self.own_key_moves:
            why = "a token that is its own key has an energy that is not concave"
            return Finding(name, Guarantee.SMALL_STEPS, why)
        alpha = self.strength()
        if alpha is not None and not bool((alpha >= 0).all()):
            return Finding(name, Guarantee.SMALL_STEPS, "not concave: a head lacks alpha >= 0")
        return Finding(name, Guarantee.EVERY_STEP, "concave: minus a logsumexp, alpha >= 0")
