"""Weights that change over the inference steps: functions of the step t = 0, 1, ...

>>> from nrgpt.dynamics.schedules import cosine, linear, switch_on
>>> [linear(0, 1, steps=5)(t) for t in range(7)]
[0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
>>> [round(cosine(0, 1, steps=5)(t), 3) for t in range(7)]
[0.0, 0.146, 0.5, 0.854, 1.0, 1.0, 1.0]
>>> [switch_on(at=2, weight=0.5)(t) for t in range(4)]
[0.0, 0.0, 0.5, 0.5]
"""

import math
from collections.abc import Callable

from ..check import check

Schedule = Callable[[int], float]


def linear(start: float, end: float, steps: int) -> Schedule:
    """From ``start`` at step 0 to ``end`` at step ``steps`` - 1, and ``end`` from then on."""
    check(steps >= 2, "steps", steps, "at least 2")
    return lambda t: start + (end - start) * min(1.0, t / (steps - 1))


def cosine(start: float, end: float, steps: int) -> Schedule:
    """``linear`` with a gentle beginning and end."""
    share = linear(0.0, 1.0, steps)
    return lambda t: start + (end - start) * (1 - math.cos(math.pi * share(t))) / 2


def switch_on(at: int, weight: float = 1.0) -> Schedule:
    """Nothing before step ``at``, ``weight`` from then on."""
    check(at >= 0, "at", at, "at least 0")
    return lambda t: weight if t >= at else 0.0
