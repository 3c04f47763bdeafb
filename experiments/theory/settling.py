"""Does token A settle after its past has, and how fast? Distances of g to where it ends, against
steps, by position: in the forward pass, and with a past that stands where it ends."""

import itertools
from typing import Any

import torch
from torch import Tensor

from nrgpt import zoo
from nrgpt.dynamics.field import Field
from nrgpt.dynamics.meaning import rank_correlation
from nrgpt.train.runs import load_run

MODELS = ("shakespeare_certified", "listops_settled")


@torch.no_grad()
def settling(name: str, *, texts: int, length: int, steps: int) -> dict[str, Any]:
    """A row, for positions in eight equal parts."""
    run = load_run(zoo.folder(name))
    model = run.model.double()
    tokens = run.first_tokens("val", texts * length).read(0, texts * length)
    idx = torch.from_numpy(tokens).view(texts, length)
    start = model.begin(idx)
    moving, end = distances(model, start, None, steps)
    ways = {"forward pass": moving}
    if not model.is_settled:
        ways["frozen past"], _ = distances(model, start, end, steps)
    row: dict[str, Any] = {"model": name, "texts": texts, "positions": length, "steps": steps}
    row |= {"trained steps": model.cfg.steps}
    position = torch.arange(length).expand(texts, -1).flatten()
    shown = sorted({round(steps ** (i / 60)) for i in range(59)})
    for way, distance in ways.items():
        time = time_to(distance, 0.1)
        # Later than this, tokens are near their ends because the walk ends there.
        powers = power_law(distance, steps // 64, steps // 8)
        row[way] = {
            "steps to a tenth of the first distance": eighths(time),
            "rank correlation with the position": rank_correlation(position, time.flatten()),
            "power of the steps": eighths(powers),
            "at step": shown,
            "distance to the end": [eighths(distance[t]) for t in shown],
        }
    return row


def eighths(values: Tensor) -> list[float]:
    """Medians over texts and an eighth of the positions, (texts, positions)."""
    return [float(f"{part.double().median().item():.4g}") for part in values.chunk(8, 1)]


def distances(model: Any, start: Tensor, past: Tensor | None, steps: int) -> tuple[Tensor, Tensor]:
    """Of g to its last value, as a share of that, (steps + 1, texts, positions); the last x."""
    field = Field(model, start, past=past)
    states = []
    for x, look in itertools.islice(field.roll(start, steps + 1), steps + 1):  # noqa: B007
        states.append(look.g)
    g = torch.stack(states)
    return (g - g[-1]).norm(dim=-1) / g[-1].norm(dim=-1), x


def time_to(distance: Tensor, share: float) -> Tensor:
    """Steps after which a token's distance stays below a share of the first one."""
    time = torch.arange(1, len(distance) + 1)[:, None, None]
    return ((distance > share * distance[0]) * time).amax(0)


def power_law(distance: Tensor, first: int, last: int) -> Tensor:
    """p of distance ~ steps^-p, by least squares between two numbers of steps."""
    t = torch.arange(first, last + 1, dtype=torch.float64).log()[:, None, None]
    y = distance[first : last + 1].clamp(min=1e-12).log()
    t = t - t.mean()
    return -(t * y).sum(0) / t.square().sum()
