"""Where a curve of accuracies crosses a level: a logistic fit, with an interval over seeds.

    accuracy = a + (1 - a) / (1 + exp(-k (x - m))),    x = log10(parameters)

with a floor a for what guessing reaches. Least squares on the means of each size, for many
resampled data sets at once. Where no such curve fits, straight lines between the means tell more.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.8
"""The accuracy that the paper calls a transition to learning."""
ROUNDS = 60
RESAMPLED = 1_000


@dataclass(frozen=True)
class Transition:
    """Numbers of parameters; infinite where the level lies beyond the largest model or no size is
    there on average, whatever the curve says, and 0 where the smallest one is above it already."""

    parameters: float
    interval: tuple[float, float]
    """95 %, by resampling the seeds of each size."""
    floor: float
    slope: float
    middle: float

    def curve(self, parameters: np.ndarray) -> np.ndarray:
        shape = np.array([[self.middle, np.log(self.slope), to_line(self.floor)]])
        return values(shape, np.log10(parameters))[0]

    def __str__(self) -> str:
        found, low, high = (shown(number) for number in (self.parameters, *self.interval))
        return found if found == low == high else f"{found} ({low} - {high})"


def shown(parameters: float) -> str:
    if parameters == 0:
        return "below all"
    return f"{parameters:,.0f}" if np.isfinite(parameters) else "not reached"


def find_transition(accuracies: Mapping[int, Sequence[float]], seed: int = 0) -> Transition:
    """From accuracies of all seeds, by number of parameters."""
    sizes = np.array(sorted(accuracies), float)
    if len(sizes) < 3:
        raise ValueError(f"a fit needs 3 sizes or more, here are {len(sizes)}")
    x = np.log10(sizes)
    means = np.array([np.mean(accuracies[int(size)]) for size in sizes])
    generator, noise = np.random.default_rng(seed), usual_deviation(accuracies.values())
    resampled = np.stack([resample(accuracies[int(n)], generator, noise) for n in sizes], axis=1)
    y = np.concatenate([means[None], resampled])
    shapes = fit(x, y)
    crossings = np.where((y >= LEVEL).any(1), crossing(shapes, x), np.inf)
    low, high = np.quantile(crossings[1:], [0.025, 0.975], method="nearest")
    m, log_k, line = shapes[0]
    return Transition(
        parameters=float(crossings[0]),
        interval=(float(low), float(high)),
        floor=float(from_line(line)),
        slope=float(np.exp(log_k)),
        middle=float(m),
    )


def interpolated(accuracies: Mapping[int, Sequence[float]]) -> float:
    """Where straight lines between the means first rise to the level."""
    sizes = sorted(accuracies)
    means = [float(np.mean(accuracies[size])) for size in sizes]
    if means[0] >= LEVEL:
        return 0.0
    for n, mean in enumerate(means):
        if mean >= LEVEL:
            left, right = np.log10(sizes[n - 1]), np.log10(sizes[n])
            share = (LEVEL - means[n - 1]) / (mean - means[n - 1])
            return float(10 ** (left + share * (right - left)))
    return float("inf")


def usual_deviation(accuracies: Iterable[Sequence[float]]) -> float:
    """Of a seed from the mean of its size, over all sizes that have several."""
    several = [own for own in accuracies if len(own) > 1]
    squares = sum(float(np.var(own)) * len(own) for own in several)
    return float(np.sqrt(squares / sum(len(own) - 1 for own in several))) if several else 0.0


def resample(
    values: Sequence[float], generator: np.random.Generator, usual_deviation: float
) -> np.ndarray:
    """Means of values drawn again. A few values drawn from themselves vary too little, by the
    factor (n - 1) / n in variance: they are moved apart by as much. One alone would not vary at
    all, and is given the deviation usual elsewhere."""
    n, mean = len(values), float(np.mean(values))
    if n == 1:
        return mean + usual_deviation * generator.standard_normal(RESAMPLED)
    apart = mean + (np.asarray(values) - mean) * np.sqrt(n / (n - 1))
    return generator.choice(apart, (RESAMPLED, n)).mean(1)


def fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(m, log k, floor as a point of the line) for each row of y, by Levenberg and Marquardt from
    the best of some starts."""
    starts = np.array(
        [[m, np.log(k), to_line(0.1)] for m in np.linspace(x[0], x[-1], 12) for k in (3, 8, 20)]
    )
    losses = ((values(starts, x)[:, None] - y[None]) ** 2).sum(-1)
    p = starts[losses.argmin(0)]
    loss, damping = losses.min(0), np.full(len(y), 1e-2)
    for _ in range(ROUNDS):
        J, residual = slopes(p, x), y - values(p, x)
        H = np.einsum("bwi,bwj->bij", J, J)
        H += (damping[:, None] * (np.einsum("bii->bi", H) + 1e-9))[..., None] * np.eye(3)
        step = np.linalg.solve(H, np.einsum("bwi,bw->bi", J, residual)[..., None])[..., 0]
        tried = p + np.clip(step, -1, 1)
        tried[:, 1] = np.clip(tried[:, 1], np.log(0.5), np.log(100))
        tried[:, 2] = np.clip(tried[:, 2], -9, 1)  # a floor of at most 0.73: below the level
        new = ((y - values(tried, x)) ** 2).sum(1)
        better = new < loss
        p, loss = np.where(better[:, None], tried, p), np.where(better, new, loss)
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-9, 1e9)
    return p


def values(p: np.ndarray, x: np.ndarray) -> np.ndarray:
    """(fits, sizes)"""
    a, s = from_line(p[:, 2:3]), from_line(np.exp(p[:, 1:2]) * (x - p[:, :1]))
    return a + (1 - a) * s


def slopes(p: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Derivatives of ``values``: (fits, sizes, 3)."""
    k, a = np.exp(p[:, 1:2]), from_line(p[:, 2:3])
    s = from_line(k * (x - p[:, :1]))
    inner = (1 - a) * s * (1 - s)
    return np.stack([-k * inner, k * (x - p[:, :1]) * inner, (1 - s) * a * (1 - a)], axis=-1)


def crossing(p: np.ndarray, x: np.ndarray) -> np.ndarray:
    a = from_line(p[:, 2])
    where = p[:, 0] + np.log((LEVEL - a) / (1 - LEVEL)) / np.exp(p[:, 1])
    return np.where(where > x[-1], np.inf, np.where(where < x[0], 0.0, 10.0**where))


def from_line(z: np.ndarray) -> np.ndarray:
    """The logistic function."""
    return 1 / (1 + np.exp(-np.clip(z, -60, 60)))


def to_line(share: float) -> float:
    return float(np.log(share / (1 - share)))
