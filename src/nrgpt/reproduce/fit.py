"""Where accuracies cross a level: a logistic fit, with an interval over seeds.

    accuracy = a + (1 - a) / (1 + exp(-k (x - m))),    x = log10(parameters)

The floor a is what guessing reaches. The fit is by least squares on the means of each size, for
many resampled data sets at once. For accuracies that do not follow such a curve there is
``interpolated``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.8
"""The accuracy at which the paper puts the transition to learning."""
ROUNDS = 60
RESAMPLED = 1_000


@dataclass(frozen=True)
class Transition:
    """The number of parameters at the level. It is 0 if the smallest model is above it, infinite
    if the curve crosses it beyond the largest model or if no size reaches it on average."""

    parameters: float
    interval: tuple[float, float]
    """95 %, by resampling the seeds of each size."""
    shape: np.ndarray
    """The parameters of the curve, as ``fit`` gives them."""

    def curve(self, parameters: np.ndarray) -> np.ndarray:
        return curves(self.shape[None], np.log10(parameters))[0][0]

    def __str__(self) -> str:
        found, low, high = (shown(number) for number in (self.parameters, *self.interval))
        return found if found == low == high else f"{found} ({low} - {high})"


def shown(parameters: float) -> str:
    if parameters == 0:
        return "below all"
    return f"{parameters:,.0f}" if np.isfinite(parameters) else "not reached"


def find_transition(accuracies: Mapping[int, Sequence[float]], seed: int = 0) -> Transition:
    """From the accuracies of all seeds, by number of parameters."""
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
    return Transition(float(crossings[0]), (float(low), float(high)), shapes[0])


def interpolated(accuracies: Mapping[int, Sequence[float]]) -> float:
    """Where straight lines between the means of the sizes first reach the level."""
    sizes = sorted(accuracies)
    means = [float(np.mean(accuracies[size])) for size in sizes]
    first = next((n for n, mean in enumerate(means) if mean >= LEVEL), None)
    if first is None:
        return float("inf")
    both = slice(first - 1, first + 1)
    return float(10 ** np.interp(LEVEL, means[both], np.log10(sizes[both]))) if first else 0.0


def usual_deviation(accuracies: Iterable[Sequence[float]]) -> float:
    """The standard deviation of a seed from the mean of its size, over sizes with several seeds."""
    several = [own for own in accuracies if len(own) > 1]
    squares = sum(float(np.var(own)) * len(own) for own in several)
    return float(np.sqrt(squares / sum(len(own) - 1 for own in several))) if several else 0.0


def resample(
    values: Sequence[float], generator: np.random.Generator, usual_deviation: float
) -> np.ndarray:
    """Means of n values drawn with replacement. Their variance would be too small by the factor
    (n - 1) / n, so the values are first moved away from their mean. A single value gets the
    standard deviation that seeds have at other sizes."""
    n, mean = len(values), float(np.mean(values))
    if n == 1:
        return mean + usual_deviation * generator.standard_normal(RESAMPLED)
    apart = mean + (np.asarray(values) - mean) * np.sqrt(n / (n - 1))
    return generator.choice(apart, (RESAMPLED, n)).mean(1)


def fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(m, log k, logit of a) for each row of y, by the Levenberg-Marquardt method from the best of
    some starts."""
    starts = np.array(
        [[m, np.log(k), logit(0.1)] for m in np.linspace(x[0], x[-1], 12) for k in (3, 8, 20)]
    )
    losses = ((curves(starts, x)[0][:, None] - y[None]) ** 2).sum(-1)
    p = starts[losses.argmin(0)]
    loss, damping = losses.min(0), np.full(len(y), 1e-2)
    for _ in range(ROUNDS):
        values, J = curves(p, x)
        H = np.einsum("bwi,bwj->bij", J, J)
        H += (damping[:, None] * (np.einsum("bii->bi", H) + 1e-9))[..., None] * np.eye(3)
        step = np.linalg.solve(H, np.einsum("bwi,bw->bi", J, y - values)[..., None])[..., 0]
        tried = p + np.clip(step, -1, 1)
        tried[:, 1] = np.clip(tried[:, 1], np.log(0.5), np.log(100))
        tried[:, 2] = np.clip(tried[:, 2], -9, 1)  # a floor of at most 0.73: below the level
        new = ((y - curves(tried, x)[0]) ** 2).sum(1)
        better = new < loss
        p, loss = np.where(better[:, None], tried, p), np.where(better, new, loss)
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-9, 1e9)
    return p


def curves(p: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The curves at x, (fits, sizes), and their derivatives by p, (fits, sizes, 3)."""
    k, a = np.exp(p[:, 1:2]), logistic(p[:, 2:3])
    s = logistic(k * (x - p[:, :1]))
    inner = (1 - a) * s * (1 - s)
    slopes = [-k * inner, k * (x - p[:, :1]) * inner, (1 - s) * a * (1 - a)]
    return a + (1 - a) * s, np.stack(slopes, axis=-1)


def crossing(p: np.ndarray, x: np.ndarray) -> np.ndarray:
    a = logistic(p[:, 2])
    where = p[:, 0] + np.log((LEVEL - a) / (1 - LEVEL)) / np.exp(p[:, 1])
    return np.where(where > x[-1], np.inf, np.where(where < x[0], 0.0, 10.0**where))


def logistic(z: np.ndarray) -> np.ndarray:
    """The logistic function."""
    return 1 / (1 + np.exp(-np.clip(z, -60, 60)))


def logit(share: float) -> float:
    return float(np.log(share / (1 - share)))
