"""One update of many models of one shape at once.

Weights, gradients and optimiser states of P runs are stacked, (P, ...), and both passes are batched
over them: what would be P small matrix products is one batched product, and what would be P kernel
launches is one. Nothing but the products' batching differs from the lone runs, so each packed run
equals its lone one within rounding (that of bfloat16 under Muon, which computes with it).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from ..kernels.attention import packed_attention
from ..model import LanguageModel
from .config import OptimiserConfig
from .optim import MUON, is_weight_matrix

ADAM_EPS = 1e-8


class PackedStep:
    """``step(x, y, masks, rates)`` updates all runs; x, y: (P, batch, tokens), rates: (P,)."""

    def __init__(self, models: list[LanguageModel], optimisers: list[OptimiserConfig]):
        self.model = models[0]
        self.model.checks_tokens = False  # looking at values is not possible while batched
        first = optimisers[0]
        named = [dict(model.named_parameters()) for model in models]
        self.weights = {
            name: torch.stack([own[name].detach() for own in named]).requires_grad_(p.requires_grad)
            for name, p in named[0].items()
        }
        learned = {name: p for name, p in named[0].items() if p.requires_grad}
        self.by_muon = [
            n for n, p in learned.items() if first.name == "muon" and is_weight_matrix(n, p)
        ]
        self.by_adam = [name for name in learned if name not in self.by_muon]
        self.state = {
            (name, kind): torch.zeros_like(self.weights[name], requires_grad=False)
            for names, kinds in (
                (self.by_muon, MUON.state),
                (self.by_adam, ("exp_avg", "exp_avg_sq")),
            )
            for name in names
            for kind in kinds
        }
        device = self.model.tokens.device

        def vector(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        self.updates = torch.zeros(len(models), dtype=torch.float64, device=device)
        self.lr = vector([o.lr for o in optimisers])
        self.muon_lr = vector([o.muon_lr for o in optimisers])
        self.weight_decay = vector([o.weight_decay for o in optimisers])
        self.beta1 = vector([o.beta1 for o in optimisers])
        self.beta2 = vector([o.beta2 for o in optimisers])
        self.clip = vector([o.clip if o.clip is not None else math.inf for o in optimisers])
        self.losses: Callable[..., Tensor] = self.losses_of_all

    def losses_of_all(self, x: Tensor, y: Tensor, masks: Tensor | None) -> Tensor:
        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor, masks: Tensor | None) -> Tensor:
            _, value = functional_call(self.model, weights, (x, y), {"masks": masks})
            return value

        dims = (0, 0, 0, None if masks is None else 0)
        with packed_attention():
            return vmap(loss, in_dims=dims)(self.weights, x, y, masks)

    def __call__(
        self, x: Tensor, y: Tensor, masks: Tensor | None, rates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Losses (P,), and which of them led to an update: a run whose loss or gradient is not
        finite stays as it is."""
        losses = self.losses(x, y, masks)
        learned = [*self.by_muon, *self.by_adam]
        gradients = torch.autograd.grad(losses.sum(), [self.weights[name] for name in learned])
        with torch.no_grad():
            squares = [g.double().square().flatten(1).sum(1) for g in gradients]
            norms = torch.stack(squares).sum(0).sqrt()
            fine = torch.isfinite(losses + norms)
            shrink = (self.clip / (norms + 1e-6)).clamp(max=1)
            rates = torch.where(fine, rates, 0)
            self.updates += 1
            for name, gradient in zip(learned, gradients, strict=True):
                shrunk = gradient * like(shrink, gradient)
                clean = torch.where(like(fine, gradient, bool), shrunk, 0)
                update = self.muon if name in self.by_muon else self.adam
                update(name, clean, rates)
        return losses.detach(), fine

    def adam(self, name: str, gradient: Tensor, rates: Tensor) -> None:
        """AdamW, as torch.optim.AdamW computes it."""
        p, m, v = self.weights[name], self.state[name, "exp_avg"], self.state[name, "exp_avg_sq"]
        lr = rates * self.lr
        if p.dim() > 2:  # a matrix, in its lone run
            p.mul_(like(1 - lr * self.weight_decay, p))
        m.lerp_(gradient, like(1 - self.beta1, p))
        v.mul_(like(self.beta2, p)).add_(gradient.square() * like(1 - self.beta2, p))
        root = (1 - self.beta2**self.updates).sqrt()
        size = v.sqrt().div_(like(root, p)).add_(ADAM_EPS)
        p.sub_(m / size * like(lr / (1 - self.beta1**self.updates), p))

    def muon(self, name: str, gradient: Tensor, rates: Tensor) -> None:
        """Muon, as torch.optim.Muon computes it."""
        p, buffer = self.weights[name], self.state[name, "momentum_buffer"]
        lr = rates * self.muon_lr
        buffer.lerp_(gradient, 1 - MUON.momentum)
        direction = orthogonalised(gradient.lerp(buffer, MUON.momentum))
        p.mul_(like(1 - lr * self.weight_decay, p))
        wide = max(1.0, p.shape[1] / p.shape[2]) ** 0.5
        p.sub_(direction * like(lr * wide, p))

    def tensors(self, run: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and optimiser state of one run, as its lone run would save them."""
        weights = {name: value[run].detach().cpu().clone() for name, value in self.weights.items()}
        adam = 1 if self.by_muon else 0
        state = {}
        for (name, kind), value in self.state.items():
            number = 0 if name in self.by_muon else adam
            state[f"{number}/{name}/{kind}"] = value[run].cpu().clone()
        count = self.updates[run].float().cpu()
        state |= {f"{adam}/{name}/step": count.clone() for name in self.by_adam}
        return weights, state

    def load(self, run: int, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in weights.items():
                self.weights[name][run] = value
            for path, value in state.items():
                _, name, kind = path.split("/")
                if kind == "step":
                    self.updates[run] = value.double()
                else:
                    self.state[name, kind][run] = value


def like(per_run: Tensor, target: Tensor, dtype: torch.dtype | type | None = None) -> Tensor:
    """A number for each run, (P,), in a shape that multiplies (P, ...)."""
    shaped = per_run.view(-1, *[1] * (target.dim() - 1))
    return shaped.bool() if dtype is bool else shaped.to(target.dtype)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Newton-Schulz iterations of Muon on each of (P, m, n)."""
    a, b, c = MUON.coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    X = matrices.bfloat16()
    X = X.mT if is_tall else X
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=MUON.eps)
    for _ in range(MUON.iterations):
        gram = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.mT if is_tall else X
