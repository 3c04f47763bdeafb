"""The paper's largest family of rates for which every energy falls in small steps: where all states
lie in a subspace S, eta may be c on S, and anything positive on what is orthogonal to S.

True where a state lies in S, for then x^T eta = c x^T, and dE/dt = -c |(1 - xx^T/|x|^2) P f|^2
- f^T eta_orthogonal f. But the force need not lie in S. It leads the state out of it, and then
nothing is promised any more: ``split`` measures what happens.
"""

from typing import Any

import torch
from torch import Tensor

from .oscillation import ENERGIES, HIDDEN, matrix

KINDS = ("c on S, free beside it", "c everywhere", "free everywhere")
SPREAD = (1.0, 3.0, 10.0, 100.0)
"""How unequal the free part's eigenvalues are: the largest over the smallest."""


def energy(name: str, W: Tensor, g: Tensor) -> Tensor:
    z = g @ W.mT
    if name.startswith("FF1"):
        return -torch.nn.functional.gelu(z).square().sum(-1)
    return -z.relu().square().sum(-1) / 2


def positive(generator: torch.Generator, draws: int, D: int, spread: float) -> Tensor:
    """Symmetric, with eigenvalues from 1 to ``spread``, evenly in their logarithms."""
    Q = torch.linalg.qr(matrix(generator, draws, D, D)).Q
    values = torch.logspace(0, torch.tensor(spread).log10().item(), D, dtype=Q.dtype)
    return (Q * values) @ Q.mT


@torch.no_grad()
def split(
    name: str, kind: str, spread: float, *, D: int, size: int, draws: int, starts: int, steps: int
) -> dict[str, Any]:
    """Tokens of RMSNorm that start in S, the first ``size`` coordinates, under small steps: which
    raise the energy, at the start and later, and how far the states have left S."""
    generator = torch.Generator().manual_seed(0)
    W = matrix(generator, draws, HIDDEN * D, D).double()
    eta = torch.zeros(draws, D, D, dtype=torch.float64)
    if kind == KINDS[0]:
        eta[:, :size, :size] = torch.eye(size)
        eta[:, size:, size:] = positive(generator, draws, D - size, spread)
    else:
        eta[:] = torch.eye(D) if kind == KINDS[1] else positive(generator, draws, D, spread)
    eta = eta / torch.linalg.matrix_norm(eta, 2)[:, None, None]
    x = torch.zeros(draws, starts, D, dtype=torch.float64)
    x[..., :size] = torch.randn(draws, starts, size, generator=generator)
    force, rises, before, outside = ENERGIES[name](W), [], None, []
    for _ in range(steps):
        x = x / x.norm(dim=-1, keepdim=True) * D**0.5  # only its direction counts
        now = energy(name, W, x)
        if before is not None:
            rises.append(now > before + 1e-12 * before.abs())
        before = now
        outside.append((x[..., size:].norm(dim=-1) / D**0.5).median().item())
        x = x + 1e-3 * force(x) @ eta.mT
    rose = torch.stack(rises).double()
    return {
        "energy": name, "eta": kind, "spread": spread, "D": D, "size of S": size, "draws": draws,
        "starts": starts, "steps": steps, "rises in the first step": rose[0].mean().item(),
        "rises": rose.mean().item(), "tokens that ever rise": rose.amax(0).mean().item(),
        "outside of S at the end": outside[-1],
    }  # fmt: skip
