"""AdamW and Muon for many models of one shape at once.

All that is learned lies side by side in one buffer (P, n), one row a run, and so do gradients and
optimiser states: what is done to all weights alike is one operation, however many there are.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .config import OptimiserConfig
from .optim import MUON

ADAM_EPS = 1e-8
ADAM_STATE = ("exp_avg", "exp_avg_sq")
ALIGNED = 16
"""Every weight begins at a multiple of this many numbers: fast loads ask for it."""


class Flat:
    """Where weights (P, ...) lie in a buffer (P, n)."""

    def __init__(self, weights: dict[str, Tensor]):
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.places: dict[str, slice] = {}
        end = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape[1:])
            self.places[name] = slice(end, end + size)
            end += -(-size // ALIGNED) * ALIGNED
        self.size = end

    def views(self, buffer: Tensor, names: Sequence[str] | None = None) -> list[Tensor]:
        """The weights' parts of a buffer, in their own shapes."""
        return [
            buffer[:, self.places[name]].view(self.shapes[name])
            for name in (self.shapes if names is None else names)
        ]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """A new buffer with parts at the places of the first so many weights, zeros between. (Not
        written part by part: a compiler would go through the whole buffer for each.)"""
        pieces = []
        for place, part in zip(self.places.values(), parts, strict=False):
            pieces.append(part.reshape(len(part), -1))
            if gap := -(place.stop - place.start) % ALIGNED:
                pieces.append(part.new_zeros(len(part), gap))
        return torch.cat(pieces, 1)


class PackedOptimiser:
    """``step(gradient, losses, rates)`` updates ``weights``, which are views of one buffer."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        by_muon: Sequence[str],
        optimisers: Sequence[OptimiserConfig],
    ):
        self.by_muon = list(by_muon)
        self.by_adam = [name for name in weights if name not in self.by_muon]
        ordered = {name: weights[name] for name in (*self.by_muon, *self.by_adam)}
        self.flat = Flat(ordered)
        runs, some = len(optimisers), next(iter(weights.values()))
        self.device = some.device
        self.buffer = some.new_zeros(runs, self.flat.size)
        views = self.flat.views(self.buffer)
        for view, weight in zip(views, ordered.values(), strict=True):
            view.copy_(weight)
        self.weights = {
            name: view.detach().requires_grad_() for name, view in zip(ordered, views, strict=True)
        }
        self.border = self.flat.places[self.by_adam[0]].start if self.by_adam else self.flat.size
        """Muon's weights come before, AdamW's from here on."""
        # Room for all weights in each, of which one part is used: so they can be named alike.
        self.states = {kind: torch.zeros_like(self.buffer) for kind in (*MUON.state, *ADAM_STATE)}
        self.momentum = self.states["momentum_buffer"][:, : self.border]
        self.exp_avg = self.states["exp_avg"][:, self.border :]
        self.exp_avg_sq = self.states["exp_avg_sq"][:, self.border :]
        # AdamW's decay is for matrices only; a matrix of a lone run has three dimensions here.
        self.decayed = self.constants(lambda shape: float(len(shape) > 2))[self.border :]
        # Muon takes larger steps in tall matrices.
        self.tall = self.constants(
            lambda shape: math.sqrt(max(1.0, shape[1] / shape[-1])) if len(shape) > 2 else 1.0
        )[: self.border]
        self.updates = torch.zeros(runs, dtype=torch.float64, device=self.device)
        self.failures = torch.full((runs, 3), -1.0, dtype=torch.float64, device=self.device)
        """Update, loss and norm of the first failure of each run; -1: none. Kept on the device, so
        that nobody waits for it after each update."""
        names = ("lr", "muon_lr", "weight_decay", "beta1", "beta2", "clip")
        numbers = [[getattr(own, name) for own in optimisers] for name in names]
        self.lr, self.muon_lr, self.weight_decay, *rest = map(self.vector, numbers)
        self.beta1, self.beta2, self.clip = rest

    def vector(self, values: list[float | None]) -> Tensor:
        """A number for each run; None is no limit."""
        numbers = [math.inf if value is None else value for value in values]
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)[:, None]

    def constants(self, of_shape: Callable[[torch.Size], float]) -> Tensor:
        """A number for each weight, spread over its place, (n,)."""
        spread = torch.zeros(self.flat.size, dtype=self.buffer.dtype)
        for name, place in self.flat.places.items():
            spread[place] = of_shape(self.flat.shapes[name])
        return spread.to(self.device)

    @torch.no_grad()
    def step(self, gradient: Tensor, losses: Tensor, rates: Tensor) -> Tensor:
        """Which runs were updated: one whose loss or gradient is not finite stays as it is.
        ``gradient`` is that of all weights, ``flat.joined``."""
        norms = gradient.double().square().sum(1, keepdim=True).sqrt()
        fine = torch.isfinite(losses[:, None] + norms)
        shrink = (self.clip / (norms + 1e-6)).clamp(max=1).to(gradient.dtype)
        gradient = torch.where(fine, gradient * shrink, 0)
        rates = torch.where(fine, rates[:, None], 0)
        found = torch.stack([self.updates, losses.double(), norms[:, 0]], 1)
        is_first = ~fine & (self.failures[:, :1] < 0)
        self.failures.copy_(torch.where(is_first, found, self.failures))
        self.updates += 1
        if self.by_muon:
            self.muon(gradient[:, : self.border], rates * self.muon_lr)
        if self.by_adam:
            self.adam(gradient[:, self.border :], rates * self.lr)
        return fine[:, 0]

    def adam(self, gradient: Tensor, lr: Tensor) -> None:
        """AdamW, as torch.optim.AdamW computes it."""
        p, dtype = self.buffer[:, self.border :], self.buffer.dtype
        updates = self.updates[:, None]
        p.mul_(1 - (lr * self.weight_decay).to(dtype) * self.decayed)
        self.exp_avg.lerp_(gradient, (1 - self.beta1).to(dtype))
        self.exp_avg_sq.mul_(self.beta2.to(dtype))
        self.exp_avg_sq.add_(gradient.square() * (1 - self.beta2).to(dtype))
        root = (1 - self.beta2**updates).sqrt().to(dtype)
        size = (self.exp_avg_sq.sqrt() / root).add_(ADAM_EPS)
        p.sub_(self.exp_avg / size * (lr / (1 - self.beta1**updates)).to(dtype))

    def muon(self, gradient: Tensor, lr: Tensor) -> None:
        """Muon, as torch.optim.Muon computes it."""
        p, dtype = self.buffer[:, : self.border], self.buffer.dtype
        self.momentum.lerp_(gradient, 1 - MUON.momentum)
        direction = self.orthogonalised(gradient.lerp(self.momentum, MUON.momentum))
        p.mul_(1 - (lr * self.weight_decay).to(dtype))
        p.sub_(direction * self.tall * lr.to(dtype))

    def orthogonalised(self, directions: Tensor) -> Tensor:
        """All matrices of one shape, up to transposition, are orthogonalised together."""
        views = dict(
            zip(self.by_muon, self.flat.views(directions.contiguous(), self.by_muon), strict=True)
        )
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, view in views.items():
            groups.setdefault(tuple(sorted(view.shape[1:])), []).append(name)
        found = {}
        for names in groups.values():
            matrices = [views[name] for name in names]
            stacked = torch.cat([m.mT if is_tall(m) else m for m in matrices])
            parts = newton_schulz(stacked).to(directions.dtype).chunk(len(names))
            for name, part in zip(names, parts, strict=True):
                found[name] = part.mT if is_tall(views[name]) else part
        return self.flat.joined([found[name] for name in self.by_muon])

    def named_states(self) -> dict[str, Tensor]:
        """States (P, ...) of the optimisers, under the names that checkpoints of lone runs use."""
        adam = 1 if self.by_muon else 0
        steps = {f"{adam}/{name}/step": self.updates for name in self.by_adam}
        return steps | {
            f"{number}/{name}/{kind}": view
            for number, names, kinds in (
                (0, self.by_muon, MUON.state),
                (adam, self.by_adam, ADAM_STATE),
            )
            for kind in kinds
            for name, view in zip(names, self.flat.views(self.states[kind], names), strict=True)
        }


def is_tall(matrices: Tensor) -> bool:
    return matrices.shape[-2] > matrices.shape[-1]


def newton_schulz(X: Tensor) -> Tensor:
    """The iterations of Muon on each of (..., m, n), m <= n, in bfloat16."""
    a, b, c = MUON.coefficients
    X = X.bfloat16()
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=MUON.eps)
    for _ in range(MUON.iterations):
        gram = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X
