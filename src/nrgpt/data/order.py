"""Where the texts of a batch begin: at random places, or in passes that meet every token once.

Both are functions of the seed and the number of the iteration alone, so that a training can go on
anywhere. Random places overlap: after as many tokens as there are, 37 % have not been seen.
"""

import functools
from typing import Literal

import numpy as np

Order = Literal["random", "passes"]


def places(
    tokens: int, order: Order, *, seed: int, step: int, size: int, context: int
) -> np.ndarray:
    """The first positions of ``size`` texts, each of ``context`` tokens and a last target."""
    if order == "random":
        # The modulo's bias is negligible.
        return (numbers(seed, step, size) % np.uint64(tokens - context)).astype(np.int64)
    per_pass = (tokens - 1) // context
    first = step * size
    whole, within = np.divmod(np.arange(first, first + size), per_pass)
    found = np.empty(size, np.int64)
    for number in np.unique(whole):
        own = whole == number
        offset, order_of_pass = shuffled(tokens, context, seed, int(number))
        found[own] = offset + context * order_of_pass[within[own]]
    return found


@functools.lru_cache(maxsize=4)
def shuffled(tokens: int, context: int, seed: int, number: int) -> tuple[int, np.ndarray]:
    """Of a pass: where its first text begins, and the order of its texts, which do not overlap.
    Fewer tokens than a text has are left out."""
    per_pass = (tokens - 1) // context
    drawn = numbers(seed, 2**63 + number, per_pass + 1)
    offset = int(drawn[0] % np.uint64(tokens - per_pass * context))
    return offset, np.argsort(drawn[1:], kind="stable")


def numbers(seed: int, step: int, count: int) -> np.ndarray:
    """Raw numbers are the same in every version of NumPy."""
    return np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(count)
