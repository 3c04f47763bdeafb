"""AdamW and Muon for many models of one shape at once.

All weights lie side by side in one buffer (P, n), with a row for each run, and so do gradients and
optimiser states. What is done to all weights alike is then one operation, however many there are.
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
"""Every weight begins at a multiple of this many numbers, so that the device can load it fast."""


class Flat:
    """The places of weights (P, ...) in a buffer (P, n)."""

    def __init__(self, weights: dict[str, Tensor]):
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.places: dict[str, slice] = {}
        end = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape[1:])
            self.places[name] = slice(end, end + size)
            end += -(-size // ALIGNED) * ALIGNED
        self.size = end

    def views(self, buffer: Tensor, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """The parts of a buffer that belong to these weights (by default all), in their shapes."""
        wanted = self.shapes if names is None else names
        return {name: buffer[:, self.places[name]].view(self.shapes[name]) for name in wanted}

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """A new buffer with a part for each weight, or for the first few of them, and zeros between
        them. (If the parts were written one by one, the compiled code would go through the whole
        buffer for each.)"""
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
        self.flat = Flat({name: weights[name] for name in (*self.by_muon, *self.by_adam)})
        runs, some = len(optimisers), next(iter(weights.values()))
        self.device = some.device
        self.buffer = some.new_zeros(runs, self.flat.size)
        views = self.flat.views(self.buffer)
        self.weights = {
            name: view.copy_(weights[name]).detach().requires_grad_()
            for name, view in views.items()
        }
        self.border = self.flat.places[self.by_adam[0]].start if self.by_adam else self.flat.size
        """Muon's weights come before this column, AdamW's from here on."""
        # Each state has room for all weights, though only some use it: the places are the same.
        self.states = {kind: torch.zeros_like(self.buffer) for kind in (*MUON.state, *ADAM_STATE)}
        self.momentum = self.states["momentum_buffer"][:, : self.border]
        self.exp_avg = self.states["exp_avg"][:, self.border :]
        self.exp_avg_sq = self.states["exp_avg_sq"][:, self.border :]
        # AdamW decays matrices only. Those have three dimensions here, the first is that of runs.
        self.decayed = self.constants(lambda shape: float(len(shape) > 2))[self.border :]
        # Muon makes larger updates of tall matrices.
        self.tall = self.constants(
            lambda shape: math.sqrt(max(1.0, shape[1] / shape[-1])) if len(shape) > 2 else 1.0
        )[: self.border]
        self.updates = torch.zeros(runs, dtype=torch.float64, device=self.device)
        self.failures = torch.full((runs, 3), -1.0, dtype=torch.float64, device=self.device)
        """Update, loss and norm of the first failure of each run, or -1. They stay on the device,
        so that no update has to wait for it."""

        def numbers(name: str) -> Tensor:
            """This setting of each run, (P, 1); None means no limit."""
            found = [getattr(own, name) for own in optimisers]
            found = [math.inf if number is None else number for number in found]
            return torch.tensor(found, dtype=torch.float64, device=self.device)[:, None]

        self.lr, self.muon_lr = numbers("lr"), numbers("muon_lr")
        self.beta1, self.beta2 = numbers("beta1"), numbers("beta2")
        self.weight_decay, self.clip = numbers("weight_decay"), numbers("clip")

    def constants(self, of_shape: Callable[[torch.Size], float]) -> Tensor:
        """(n,): at the place of each weight, a number that depends on its shape."""
        spread = torch.zeros(self.flat.size, dtype=self.buffer.dtype)
        for name, place in self.flat.places.items():
            spread[place] = of_shape(self.flat.shapes[name])
        return spread.to(self.device)

    @torch.no_grad()
    def step(self, gradient: Tensor, losses: Tensor, rates: Tensor) -> Tensor:
        """Update the weights; returns which runs were updated. A run whose loss or gradient is not
        finite stays as it is. ``gradient`` is that of all weights, as ``flat.joined`` gives it."""
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
        """Orthogonalise all matrices of one shape, up to transposition, together."""
        views = self.flat.views(directions.contiguous(), self.by_muon)
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
        """The states (P, ...) of the optimisers, by their names in checkpoints of plain runs."""
        adam = 1 if self.by_muon else 0
        kinds = [(0, self.by_muon, kind) for kind in MUON.state]
        kinds += [(adam, self.by_adam, kind) for kind in ADAM_STATE]
        return {f"{adam}/{name}/step": self.updates for name in self.by_adam} | {
            f"{number}/{name}/{kind}": view
            for number, names, kind in kinds
            for name, view in self.flat.views(self.states[kind], names).items()
        }


def is_tall(matrices: Tensor) -> bool:
    return matrices.shape[-2] > matrices.shape[-1]


def newton_schulz(X: Tensor) -> Tensor:
    """Muon's Newton-Schulz iterations on each matrix of (..., m, n), m <= n, in bfloat16."""
    a, b, c = MUON.coefficients
    X = X.bfloat16()
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=MUON.eps)
    for _ in range(MUON.iterations):
        gram = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X
