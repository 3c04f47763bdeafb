"""The models that studies of Shakespeare compare: their titles, colours and order."""

from typing import Any

from .tables import Row

TITLES = {
    "gpt": "GPT",
    "rgpt": "RGPT",
    "rgpt_parallel": "RGPT-parallel",
    "nrgpt_ff1": "NRGPT FF1",
    "nrgpt_ff2w": "NRGPT FF2W",
    "nrgpt_certified": "NRGPT, certified",
}
COLOURS = dict(zip(TITLES, ("black", "C7", "C3", "C0", "C1", "C2"), strict=True))


def in_order(groups: dict[tuple[Any, ...], list[Row]]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Groups whose first label is a model, in the order of TITLES."""
    order = list(TITLES).index
    return sorted(groups.items(), key=lambda group: (order(group[0][0]), *group[0][1:]))
