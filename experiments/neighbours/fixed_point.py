"""A model that is read where it has come to rest, and trained without its steps.

    python -m experiments.neighbours.fixed_point [--seeds 0,1] [--quick]

One layer of a GPT makes a state s of each token, and the keys of a past that stands still. Each
token then rolls down

    U(x) = |x - s|^2 / 2 + c E(x),    x* = s + c f(x*),   f = -dE/dx,

E being NRGPT's energy (attention to the settled past, and a memory) of the token itself, without a
norm. Backward, implicit differentiation needs u with (1 - c df/dx) u = dL/dx*, and 1 - c df/dx is
the Hessian of U: symmetric, of each token alone, and positive definite in a minimum that is not
flat. So conjugate gradients solve it, with products of the Hessian and a vector.

With a norm, x <- x + c f(norm(x)), the Jacobian is a product of two symmetric matrices and not
symmetric; with a past that moves it is not symmetric either, since nobody acts on earlier tokens.
``asymmetries`` measures both.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from experiments import training
from nrgpt.kernels.loss import plain_loss
from nrgpt.model.block import EnergyBlock
from nrgpt.model.config import ModelConfig
from nrgpt.model.init import initialise
from nrgpt.model.network import Network
from nrgpt.model.step import Plan

from .models import MEMORY, config

HERE = Path(__file__).parent
Map = Callable[[Tensor], Tensor]


@dataclasses.dataclass
class Solved:
    """How hard it was: evaluations of the map forward, products backward, and what was left."""

    forward: int = 0
    backward: int = 0
    residual: float = 0.0
    adjoint_residual: float = 0.0


def solve(step: Map, x: Tensor, tolerance: float, most: int) -> tuple[Tensor, int, float]:
    """x with step(x) = x, by iteration; how many it took, and the largest relative residual."""
    number, left = 0, float("inf")
    while number < most and left >= tolerance:
        y = step(x)
        left = ((y - x).norm(dim=-1) / y.norm(dim=-1).clamp(min=1e-12)).max().item()
        number, x = number + 1, y
    return x, number, left


def conjugate_gradients(
    product: Map, b: Tensor, tolerance: float, most: int
) -> tuple[Tensor, int, float]:
    """u with product(u) = b for each token alone, (batch, tokens, D)."""

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(-1, keepdim=True)

    tiny = torch.finfo(b.dtype).tiny
    u, r = torch.zeros_like(b), b
    p, rr = r, dot(r, r)
    least = tolerance**2 * rr
    number, is_left = 0, rr > least
    while number < most and bool(is_left.any()):
        Ap = product(p)
        curvature = dot(p, Ap)
        is_left = (rr > least) & (curvature > 0)  # the others are done, or in no minimum
        step = torch.where(is_left, rr / curvature.clamp(min=tiny), 0)
        u, r = u + step * p, r - step * Ap
        new = dot(r, r)
        p, rr = r + new / rr.clamp(min=tiny) * p, new
        number, is_left = number + 1, is_left & (rr > least)
    return u, number, (rr / dot(b, b).clamp(min=tiny)).max().sqrt().item()


class FixedPoint(Network):
    """``unrolled``: the gradient goes back through that many steps instead."""

    def __init__(self, outer: ModelConfig, inner: ModelConfig, unrolled: int | None = None):
        super().__init__(outer)
        self.block = EnergyBlock(inner)
        names = initialise(self.block, inner)
        self.for_muon |= {f"block.{name}": kind for name, kind in names.items()}
        self.unrolled = unrolled
        self.tolerance, self.most = 1e-4, 100
        self.solved = Solved()

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        plan = self.block.plan()
        s = self.final_norm(self.last_state(idx, dropout=False))
        seen = plan.settle(s)

        def step(x: Tensor) -> Tensor:
            return s + plan.move(x, 0, seen) - x  # plan.move adds c f(x) to x

        logits = self.readout(self.rest(step, s))
        return logits, None if targets is None else plain_loss(logits, targets)

    def rest(self, step: Map, s: Tensor) -> Tensor:
        if self.unrolled is not None:
            for _ in range(self.unrolled):
                s = step(s)
            return s
        with torch.no_grad():
            x, self.solved.forward, self.solved.residual = solve(step, s, self.tolerance, self.most)
        if not torch.is_grad_enabled():
            return x
        x = x.detach().requires_grad_()
        y = step(x)
        y.register_hook(self.adjoint(step, x.detach()))
        return y

    def adjoint(self, step: Map, x: Tensor) -> Map:
        """dL/dx* -> (Hessian of U)^-1 dL/dx*. The graph of y is on its way back when this is
        called, so the products need one of their own."""

        def solved(slope: Tensor) -> Tensor:
            with torch.enable_grad():
                own = x.clone().requires_grad_()
                y = step(own)

            def product(v: Tensor) -> Tensor:
                (Jv,) = torch.autograd.grad(y, own, v, retain_graph=True)
                return v - Jv

            u, self.solved.backward, self.solved.adjoint_residual = conjugate_gradients(
                product, slope, self.tolerance, self.most
            )
            return u.detach()

        return solved


def make(outer: ModelConfig, width: int, unrolled: int | None = None) -> FixedPoint:
    inner = dataclasses.replace(
        outer, block="nrgpt", past="settled", mask="inclusive", norm="none", steps=1,
        rate="scalar", rate_scale=0.5, width=width, learn_alpha=False,
    )  # fmt: skip
    return FixedPoint(outer, dataclasses.replace(inner, **MEMORY), unrolled)


def asymmetry(step: Map, x: Tensor) -> float:
    """|J - J^T| / |J| of a map of one text's tokens (1, tokens, D)."""
    J = torch.autograd.functional.jacobian(step, x).reshape(x.numel(), x.numel())
    J = J - torch.eye(len(J), dtype=J.dtype)
    return ((J - J.T).norm() / J.norm()).item()


def asymmetries(width: int = 12, tokens: int = 6) -> dict[str, float]:
    """Of what a step adds, in random models: with a settled past and without a norm it is a
    gradient, and otherwise not."""
    x = torch.randn(1, tokens, width, dtype=torch.float64)
    found, settled = {}, {"past": "settled", "mask": "inclusive"}
    kinds: dict[str, dict[str, Any]] = {
        "settled, no norm": {**settled, "norm": "none"},
        "settled, RMSNorm": {**settled, "norm": "rmsnorm"},
        "settled, LayerNorm": {**settled},
        "moving, no norm": {"norm": "none"},
    }
    for name, fields in kinds.items():
        cfg = ModelConfig(
            vocab_size=5, context=tokens, width=width, heads=2, steps=1, feedforward="memory",
            rate="scalar", init_std=0.3, **fields,
        )  # fmt: skip
        network = Network(cfg).double()
        plan = network.plan().blocks[0]
        assert isinstance(plan, Plan)
        seen = plan.settle(x) if plan.settled else None
        found[name] = asymmetry(partial(plan.move, t=0, memory=seen), x)
    return found


def main(
    seeds: Annotated[str, typer.Option(help="separated by commas")] = "0,1",
    quick: Annotated[bool, typer.Option(help="in tiny: does everything run?")] = False,
) -> None:
    """Train a model at its fixed point, and the same one through 4 and 8 steps."""
    torch.set_num_threads(1)
    print(json.dumps(asymmetries()))
    for seed in map(int, seeds.split(",")):
        cfg = config("gpt", seed=seed, quick=quick)
        width = 16 if quick else 72
        outer = dataclasses.replace(cfg.model, width=width, steps=1, context=cfg.model.context)
        for name, unrolled in {"fixed_point": None, "unrolled_4": 4, "unrolled_8": 8}.items():
            torch.manual_seed(seed)
            model = make(outer, width, unrolled)
            began = time.process_time()
            losses = training.train(model, cfg, training.batches(cfg, "train", seed))
            row = {
                "model": name,
                "seed": seed,
                "parameters": training.learned_parameters(model),
                "train_loss": sum(losses[-20:]) / len(losses[-20:]),
                "estimate": training.mean_loss(model, training.batches(cfg, "val", 1), 8),
                "cpu_seconds": round(time.process_time() - began, 1),
                **dataclasses.asdict(model.solved),
            }
            if quick:
                print(json.dumps(row))
            else:
                training.add_row(HERE / "fixed_point.jsonl", row)


if __name__ == "__main__":
    typer.run(main)
