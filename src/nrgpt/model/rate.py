"""Inference rates eta: how a force on g becomes a move of x, x <- x - eta dE/dg.

| rate                | eta             | promises descent (levels of nrgpt.model.certificate) |
|---------------------|-----------------|------------------------------------------------------|
| identity            | 1               | only while gamma is one constant > 0, or no norm     |
| scalar              | c > 0           | the same                                             |
| gamma               | c Gamma         | with every norm                                      |
| gamma_per_step      | c^(t) Gamma     | with every norm                                      |
| free                | any matrix      | no, unless its present values happen to be right     |
| free_per_step       | any matrices    | the same                                             |
| free_per_term       | one per energy  | the same, and only where they are equal              |
| gains               | diag c_i^(t)    | no (one vector for each energy i and step t)         |
| psd_skew            | U^T U + V - V^T | without a norm; with one, as free                    |
| psd_skew_per_step   | one for each t  | the same                                             |
| state               | M(x) P_A Gamma  | for small steps, with every norm                     |

"With every norm" means: at every step where the energies are concave, for small steps otherwise.
Past the last trained step a per-step rate keeps its last value.

With the cone (nrgpt.model.safeguard) every rate descends. Where terms have write weights of their
own, eta multiplies what these write.

What all steps share is folded into the way back once per forward pass (``fold``); what changes from
step to step or with the state is applied to the force (``apply_step``).
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .certificate import Finding, Guarantee
from .config import ModelConfig
from .init import Muon, log_rate, parameter, rate_logit, rate_matrix, rate_root, rate_vector, zeros
from .norm import NoNorm, Norm


class Rate(nn.Module, ABC):
    differs_by_term = False
    """Whether each energy term is moved by an eta of its own."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.width = cfg.width
        self.per_step = cfg.rate.endswith("_per_step")
        self.is_folded = cfg.rate not in ("state", "gains") and not self.per_step
        """``apply_step`` has nothing left to do."""

    def fold(self, M: Tensor, norm: Norm, term: str) -> Tensor:
        """The part of eta that all steps share, for the energy term of that name, times M of shape
        (D,) or (D, m)."""
        return M

    def apply_step(self, force: Tensor, t: int, x: Tensor, norm: Norm) -> Tensor:
        """The rest of eta at step t, times ``force`` of shape (batch, tokens, D)."""
        return force

    def combined(self, parts: dict[str, Tensor], t: int, x: Tensor, norm: Norm) -> Tensor:
        """The update, from the parts of the terms by name, with what all steps share in them."""
        first, *others = parts.values()
        return self.apply_step(sum(others, first.to(x.dtype)), t, x, norm)

    @abstractmethod
    def guarantee(self, norm: Norm) -> Finding:
        """What eta promises beside this norm, at the present values of both."""


def nearest(t: int, steps: int) -> int:
    """The trained step whose eta serves at t: later steps have the last one's, and those of a
    shared prelude, before 0, the first one's."""
    return min(max(t, 0), steps - 1)


class ConstantRate(Rate):
    """A rate that does not look at x: eta^(t) is a matrix that can be written down."""

    @abstractmethod
    def matrices(self, norm: Norm) -> Tensor:
        """eta, shape (1, D, D), or (T, D, D) if it differs from step to step."""

    def by_design(self, norm: Norm) -> bool:
        """Whether descent holds beside this norm for all (finite) values of the parameters."""
        return False

    @torch.no_grad()
    def guarantee(self, norm: Norm) -> Finding:
        part = f"rate {type(self).__name__}"
        matrices = self.matrices(norm).cpu().double()  # Apple's GPUs have no float64
        if not torch.isfinite(matrices).all():
            return Finding(part, Guarantee.NONE, "eta is not finite")
        if norm.gamma is None:
            holds, why = is_semidefinite, "without a norm, eta's symmetric part must be psd"
        else:
            holds, why = is_multiple_of_gamma, "with a norm, eta must be c Gamma with c > 0"
        if self.by_design(norm):
            return Finding(part, Guarantee.EVERY_STEP, f"by design: {why}")
        for t, eta in enumerate(matrices):
            if not holds(eta, norm):
                return Finding(part, Guarantee.NONE, f"{why}; at step {t} it is not")
        why = f"{why}, and is at present; training may change that"
        return Finding(part, Guarantee.EVERY_STEP, why)


def is_semidefinite(eta: Tensor, norm: Norm) -> bool:
    """Whether the symmetric part has no eigenvalue below zero, but for rounding."""
    eigenvalues = torch.linalg.eigvalsh((eta + eta.T) / 2)
    rounding = len(eta) * torch.finfo(torch.float64).eps * eigenvalues.abs().max()
    return bool(eigenvalues[0] >= -rounding)


def is_multiple_of_gamma(eta: Tensor, norm: Norm) -> bool:
    """Whether eta = c Gamma with one c > 0, entry by entry, to the rounding of float32."""
    assert norm.gamma is not None
    gamma = norm.gamma.cpu().double()
    off_diagonal = eta - eta.diagonal().diag()
    c = (eta.diagonal() @ gamma) / (gamma @ gamma)
    fits = (eta.diagonal() - c * gamma).abs() <= 1e-6 * (c * gamma).abs()
    return bool(c > 0 and fits.all() and not off_diagonal.any())


def times_gamma(M: Tensor, norm: Norm) -> Tensor:
    """Gamma M for M of shape (D,) or (D, m)."""
    if norm.gamma is None:
        return M
    return norm.gamma * M if M.dim() == 1 else norm.gamma[:, None] * M


class Identity(ConstantRate):
    """eta = 1."""

    def by_design(self, norm: Norm) -> bool:
        return norm.gamma is None or not norm.gamma.requires_grad

    def matrices(self, norm: Norm) -> Tensor:
        return torch.eye(self.width, device=None if norm.gamma is None else norm.gamma.device)[None]


class Scalar(Identity):
    """eta = c, kept positive as exp(log_c)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.log_c = parameter(cfg.steps if self.per_step else 1, start=log_rate)

    def fold(self, M: Tensor, norm: Norm, term: str) -> Tensor:
        return M if self.per_step else self.log_c.exp() * M

    def apply_step(self, force: Tensor, t: int, x: Tensor, norm: Norm) -> Tensor:
        return self.log_c[nearest(t, len(self.log_c))].exp() * force if self.per_step else force

    def matrices(self, norm: Norm) -> Tensor:
        return self.log_c.exp()[:, None, None] * torch.eye(self.width).to(self.log_c)


class Gamma(Scalar):
    """eta = c Gamma or c^(t) Gamma: the paper's Proposition 1, and the discrete theorem."""

    def by_design(self, norm: Norm) -> bool:
        return True

    def fold(self, M: Tensor, norm: Norm, term: str) -> Tensor:
        return super().fold(times_gamma(M, norm), norm, term)

    def matrices(self, norm: Norm) -> Tensor:
        Gamma = times_gamma(torch.eye(self.width).to(self.log_c), norm)
        return self.log_c.exp()[:, None, None] * Gamma


class MatrixRate(ConstantRate):
    """eta from learned matrices: one for all steps, folded, or one for each, applied."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.copies = (cfg.steps,) if self.per_step else ()
        self.muon: Muon | None = None if self.per_step else "eta"

    @abstractmethod
    def eta_at(self, index: tuple[int, ...]) -> Tensor:
        """eta of the step ``index``, which is () where all steps share it; shape (D, D)."""

    def fold(self, M: Tensor, norm: Norm, term: str) -> Tensor:
        return M if self.copies else self.eta_at(()) @ M

    def apply_step(self, force: Tensor, t: int, x: Tensor, norm: Norm) -> Tensor:
        if not self.copies:
            return force
        return F.linear(force, self.eta_at((nearest(t, self.copies[0]),)))

    def matrices(self, norm: Norm) -> Tensor:
        steps = [(t,) for t in range(self.copies[0])] if self.copies else [()]
        return torch.stack([self.eta_at(step) for step in steps])


class Free(MatrixRate):
    """eta any matrix, as in the paper's experiments."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        shape = (*self.copies, cfg.width, cfg.width)
        self.eta = parameter(*shape, start=rate_matrix, muon=self.muon)

    def eta_at(self, index: tuple[int, ...]) -> Tensor:
        return self.eta[index]


class FreePerTerm(ConstantRate):
    """x <- x - sum_i eta_i dE_i/dg, each eta_i any matrix; an extra term has their mean.

    Attention's force leaves through the weights of its queries, so what comes after it has the
    work of a transformer's projection to do; the feed-forward part asks for something else. One
    matrix for both is a compromise (experiments/levers). Folded, two are computed as fast as one.
    """

    differs_by_term = True

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        for term in cfg.terms:
            eta = parameter(cfg.width, cfg.width, start=rate_matrix, muon="eta")
            self.register_parameter(f"eta_{term}", eta)

    def fold(self, M: Tensor, norm: Norm, term: str) -> Tensor:
        own = getattr(self, f"eta_{term}", None)
        return (torch.stack(list(self.parameters())).mean(0) if own is None else own) @ M

    def matrices(self, norm: Norm) -> Tensor:
        return next(self.parameters())[None]  # looked at only where the others are the same

    def guarantee(self, norm: Norm) -> Finding:
        first, *others = self.parameters()
        if all(torch.equal(first, other) for other in others):
            return super().guarantee(norm)
        why = "each term has an eta of its own, so it is not their sum that falls"
        return Finding("rate FreePerTerm", Guarantee.NONE, why)


class Gains(Rate):
    """eta_i^(t) = diag c_i^(t): a vector for each energy and step. An extra term has their mean."""

    differs_by_term = True

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.steps = cfg.steps
        for term in cfg.terms:
            gains = parameter(cfg.steps, cfg.width, start=rate_vector)
            self.register_parameter(f"c_{term}", gains)

    def combined(self, parts: dict[str, Tensor], t: int, x: Tensor, norm: Norm) -> Tensor:
        step = nearest(t, self.steps)
        gained = []
        for name, part in parts.items():
            c = getattr(self, f"c_{name}", None)
            c = torch.stack(list(self.parameters())).mean(0) if c is None else c
            gained.append(c[step] * part.to(x.dtype))
        return sum(gained[1:], gained[0])

    def guarantee(self, norm: Norm) -> Finding:
        why = "each energy and coordinate has an eta of its own"
        return Finding("rate Gains", Guarantee.NONE, why)


class PsdSkew(MatrixRate):
    """eta = U^T U + V - V^T: every matrix whose symmetric part is positive semi-definite."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        rows = cfg.rate_rank or cfg.width
        self.U = parameter(*self.copies, rows, cfg.width, start=rate_root, muon=self.muon)
        self.V = parameter(*self.copies, cfg.width, cfg.width, start=zeros, muon=self.muon)

    def by_design(self, norm: Norm) -> bool:
        return norm.gamma is None

    def eta_at(self, index: tuple[int, ...]) -> Tensor:
        U, V = self.U[index], self.V[index]
        return U.T @ U + V - V.T


class State(Rate):
    """eta = M(x) P_A Gamma with M(x) = diag softplus(W_M g + b_M), positive definite.

    The paper allows any positive semi-definite M(x); a positive diagonal read off the token is
    the simplest that uses x. dE/dt = -(1/r) v^T P M P v <= 0 with v = -Gamma dE/dg. A large
    step may still raise E: P removes the part of v along x, which the discrete proof needs.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.W_M = parameter(cfg.width, cfg.width, start=zeros, muon="eta")
        self.b_M = parameter(cfg.width, start=rate_logit)

    def fold(self, M: Tensor, norm: Norm, term: str) -> Tensor:
        return times_gamma(M, norm)

    def apply_step(self, force: Tensor, t: int, x: Tensor, norm: Norm) -> Tensor:
        M = F.softplus(F.linear(norm(x), self.W_M, self.b_M))
        return M * norm.project(x, force)

    def guarantee(self, norm: Norm) -> Finding:
        if isinstance(norm, NoNorm):
            why = "no norm, and M(x) is positive definite"
            return Finding("rate State", Guarantee.EVERY_STEP, why)
        why = "P M(x) P is positive semi-definite, which is enough in continuous time only"
        return Finding("rate State", Guarantee.SMALL_STEPS, why)


RATES: dict[str, type[Rate]] = {
    "identity": Identity,
    "scalar": Scalar,
    "gamma": Gamma,
    "gamma_per_step": Gamma,
    "free": Free,
    "free_per_step": Free,
    "free_per_term": FreePerTerm,
    "gains": Gains,
    "psd_skew": PsdSkew,
    "psd_skew_per_step": PsdSkew,
    "state": State,
}


def make_rate(cfg: ModelConfig) -> Rate:
    return RATES[cfg.rate](cfg)
