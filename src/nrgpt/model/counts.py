"""How many parameters a network learns, by what they are for."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ParameterCounts:
    """Trainable parameters. ``groups`` sum to ``total``, which is ``tied`` or ``untied``: the
    counts with and without sharing the token embedding with the head."""

    groups: dict[str, int]
    total: int
    tied: int
    untied: int


def count_parameters(
    named: Iterable[tuple[str, Tensor]], embedding: int, *, tied: bool
) -> ParameterCounts:
    """``embedding``: the size of the token embedding, which is the head's if they are tied."""
    groups: Counter[str] = Counter()
    for name, p in named:
        if p.requires_grad:
            groups[group_of(name)] += p.numel()
    total = sum(groups.values())
    if tied:
        return ParameterCounts(dict(groups), total, total, total + embedding)
    return ParameterCounts(dict(groups), total, total - embedding, total)


def group_of(parameter: str) -> str:
    """blocks.3.attention.W_Q -> attention; head_bias -> head; final_norm.gamma -> final_norm."""
    parts = [p for p in parameter.split(".") if p not in ("blocks", "energy", "terms")]
    group = next(p for p in parts if not p.isdigit())
    return {"head_bias": "head", "norm_1": "norm", "norm_2": "norm"}.get(group, group)
