"""Single tokens under x <- x + eta f(g): which of them never come to rest?

A token has no past here: its energy is a feed-forward energy alone, whose landscape never changes.
Its normalised state u is followed over many steps. Slow convergence is not oscillation, and small
steps are not rest: x grows under a norm, and the same move of x turns u less and less. So |x| is
held (see ``rolled``), and what counts is how far u strays between half of the steps and all:

    at rest      by less than 1 % of its size
    oscillating  by more, and by at least half as much as in a window four times as early
    slow         by more, but less than half of that
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN = 4
AWAY, SHRINKS = 0.01, 0.5
SIZE = 20.0
"""|x| / sqrt(D) where it is held: a step then turns u by a few hundredths."""
Force = Callable[[Tensor], Tensor]


def matrix(generator: torch.Generator, *shape: int) -> Tensor:
    """Independent normal entries, of variance 1 over the number of columns."""
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def ff1(W: Tensor) -> Force:
    """E = -|GELU(W g)|^2."""

    def force(g: Tensor) -> Tensor:
        z = g @ W.mT
        cdf, pdf = torch.special.ndtr(z), torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return (2 * z * cdf * (cdf + z * pdf)) @ W

    return force


def memory(W: Tensor) -> Force:
    """E = -|ReLU(W g)|^2 / 2: concave."""
    return lambda g: F.relu(g @ W.mT) @ W


ENERGIES = {"FF1 (GELU)": ff1, "memory (ReLU²)": memory}


def normalise(norm: str, x: Tensor) -> Tensor:
    if norm == "layernorm":
        return F.layer_norm(x, x.shape[-1:])
    return F.rms_norm(x, x.shape[-1:]) if norm == "rmsnorm" else x


# Families of eta, each of spectral norm 1 ---------------------------------------------------------


def skew(generator: torch.Generator, draws: int, D: int) -> Tensor:
    V = matrix(generator, draws, D, D)
    V = V - V.mT
    return V / torch.linalg.matrix_norm(V, 2)[:, None, None]


def identity_and_skew(generator: torch.Generator, draws: int, D: int, ratio: float) -> Tensor:
    """1 + ratio (V - V^T) / |V - V^T|."""
    return torch.eye(D) + ratio * skew(generator, draws, D)


def shifted_gaussian(generator: torch.Generator, draws: int, D: int, shift: float) -> Tensor:
    """shift + G: eigenvalues fill a disc of radius 1 around the shift."""
    return shift * torch.eye(D) + matrix(generator, draws, D, D)


def square_and_skew(generator: torch.Generator, draws: int, D: int, ratio: float) -> Tensor:
    """U^T U / |U^T U| + ratio (V - V^T) / |V - V^T|."""
    U = matrix(generator, draws, D, D)
    S = U.mT @ U
    S = S / torch.linalg.matrix_norm(S, 2)[:, None, None]
    return S + ratio * skew(generator, draws, D)


RATIOS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
FAMILIES: dict[str, tuple[Callable[..., Tensor], tuple[float, ...], str]] = {
    "identity": (identity_and_skew, RATIOS, r"$k/s$ in $\eta = s + k\,(V - V^T)/\|V - V^T\|$"),
    "gaussian": (shifted_gaussian, (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0), r"$s$ in $\eta = s + G$"),
    "psd_skew": (square_and_skew, RATIOS, r"$k$ in $\eta = U^TU + k\,(V - V^T)$, both of norm 1"),
}


# Following them -----------------------------------------------------------------------------------


@torch.no_grad()
def follow(
    eta: Tensor, force: Force, norm: str, x: Tensor, steps: int, *, size: float | None
) -> dict[str, Tensor]:
    """Tokens x (..., matrices, starts, D), each under its matrix of eta (..., matrices, D, D)."""
    windows = {"early": range(steps // 8, steps // 4 + 1), "late": range(steps // 2, steps + 1)}
    low: dict[str, Tensor] = {}
    high: dict[str, Tensor] = {}
    before = u = x
    for t, u in rolled(eta, force, norm, x, steps, size):
        for name, window in windows.items():
            if t in window:
                low[name] = torch.minimum(low.get(name, u), u)
                high[name] = torch.maximum(high.get(name, u), u)
        if t < steps:
            before = u
    early, late = ((high[name] - low[name]).norm(dim=-1) / 2 for name in windows)
    away, stays = late > AWAY, late >= SHRINKS * early
    step = (u - before).norm(dim=-1)
    return {"oscillating": away & stays, "slow": away & ~stays, "step": step}


def rolled(
    eta: Tensor, force: Force, norm: str, x: Tensor, steps: int, size: float | None
) -> Iterator[tuple[int, Tensor]]:
    """(step, u), with |u| = 1. ``size`` holds |x| / sqrt(D) at this value: where x grows without
    end, its steps on the sphere become those of a flow, and only time passes more slowly with every
    step. Holding x keeps the way and lets time pass evenly. Without a norm x may grow without end
    as well, but both energies are then homogeneous in the limit, and it is scaled down when it is
    too large, which does not turn it."""
    if size is not None:
        x = size * F.rms_norm(x, x.shape[-1:], eps=0.0)
    for t in range(steps + 1):
        g = normalise(norm, x)
        u = x if norm == "none" else g
        yield t, u / u.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        x = x + force(g) @ eta.mT
        if size is not None:
            x = size * F.rms_norm(
                x - x.mean(-1, keepdim=True) * (norm == "layernorm"), x.shape[-1:], eps=0.0
            )
        if norm == "none":
            x = x / (x.norm(dim=-1, keepdim=True) / 1e6).clamp(min=1)


def study(
    energy: str, norm: str, family: str, D: int, *, draws: int, starts: int, steps: int, held: bool
) -> list[dict[str, Any]]:
    """A row for each member of a family. Each draw has weights W and a matrix eta of its own (of
    spectral norm 1), the same W for all members; starts are standard normal."""
    make, values, _ = FAMILIES[family]
    generator = torch.Generator().manual_seed(0)
    force = ENERGIES[energy](matrix(generator, draws, HIDDEN * D, D))
    seeds = [torch.Generator().manual_seed(1) for _ in values]  # the same V for each ratio
    eta = torch.stack([make(g, draws, D, value) for g, value in zip(seeds, values, strict=True)])
    eta = eta / torch.linalg.matrix_norm(eta, 2)[..., None, None]
    x = torch.randn(draws, starts, D, generator=generator).expand(len(values), -1, -1, -1)
    found = follow(eta, force, norm, x, steps, size=SIZE if held else None)
    rows = []
    for i, value in enumerate(values):
        moving, step = found["oscillating"][i], found["step"][i]
        row = {"energy": energy, "norm": norm, "family": family, "D": D, "value": value}
        row |= {"draws": draws, "starts": starts, "steps": steps, "held": held}
        row |= {"oscillating": moving.double().mean().item()}
        row |= {"slow": found["slow"][i].double().mean().item()}
        row["of each draw"] = moving.double().mean(1).tolist()
        row["median last step"] = step[moving].median().item() if moving.any() else None
        rows.append(row)
    return rows


# The quadratic case, where the answer is known ----------------------------------------------------


def turns_for_ever(eta: Tensor, M: Tensor) -> Tensor:
    """For E = -g M g / 2 and g = x / |x|: x' = eta M x in its own time, so the direction comes to
    rest if the rightmost eigenvalue of eta M is real, and turns for ever if it is complex."""
    values = torch.linalg.eigvals(eta @ M)
    rightmost = values.gather(-1, values.real.argmax(-1, keepdim=True))[..., 0]
    return rightmost.imag.abs() > 1e-6 * rightmost.abs()


def quadratic(family: str, D: int, draws: int) -> list[dict[str, Any]]:
    """How many matrices of a family turn every direction for ever, for E = -|W g|^2 / 2."""
    make, values, _ = FAMILIES[family]
    rows = []
    for value in values:
        generator = torch.Generator().manual_seed(0)
        W = matrix(generator, draws, HIDDEN * D, D)
        share = turns_for_ever(make(generator, draws, D, value).double(), (W.mT @ W).double())
        row = {"energy": "quadratic", "norm": "rmsnorm", "family": family, "D": D, "value": value}
        rows.append(row | {"draws": draws, "oscillating": share.double().mean().item()})
    return rows


def periods(energy: str, norm: str, family: str, D: int, value: float, *, steps: int) -> Any:
    """Of tokens that oscillate: their strongest period, and how much of the power is at it. Also a
    few of the ways, along the direction in which each moves most."""
    make, _, _ = FAMILIES[family]
    generator, draws, starts = torch.Generator().manual_seed(0), 6, 8
    force = ENERGIES[energy](matrix(generator, draws, HIDDEN * D, D))
    eta = make(torch.Generator().manual_seed(1), draws, D, value)
    eta = eta / torch.linalg.matrix_norm(eta, 2)[..., None, None]
    x = torch.randn(draws, starts, D, generator=generator)
    with torch.no_grad():
        rolls = rolled(eta, force, norm, x, 2 * steps, None if norm == "none" else SIZE)
        way = torch.stack([u.flatten(0, 1) for t, u in rolls if t > steps]).transpose(0, 1)
    way = way - way.mean(1, keepdim=True)
    way = way[way.norm(dim=-1).amax(-1) > AWAY]
    power = torch.fft.rfft(way * torch.hann_window(steps)[:, None], dim=1).abs().square().sum(-1)
    power[:, 0] = 0
    peak = power.argmax(1)
    near = (torch.arange(power.shape[1]) - peak[:, None]).abs() <= 2
    share = (power * near).sum(1) / power.sum(1)
    row = {"energy": energy, "norm": norm, "family": family, "D": D, "value": value}
    row |= {"steps": 2 * steps, "tokens": draws * starts, "oscillating": len(way)}
    if len(way):
        row["periods (10, 50, 90 %)"] = torch.quantile(steps / peak, PARTS).tolist()
        row["share of power at it"] = torch.quantile(share, PARTS).tolist()
    shown = way[:: max(1, len(way) // 3)][:3]
    strongest = torch.linalg.svd(shown, full_matrices=False)[2][:, 0]
    return row, (shown @ strongest[..., None])[..., 0], power[:: max(1, len(way) // 3)][:3]


PARTS = torch.tensor([0.1, 0.5, 0.9])
