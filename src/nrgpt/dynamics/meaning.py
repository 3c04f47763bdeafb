"""Does the energy mean anything? What a token's energy, force and path say about its loss, and
whether they tell familiar texts from strange ones, compared with the signals that any language
model has."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..check import check
from ..model.network import Network
from .trajectory import energy_name, trajectory


def signals(model: Network, idx: Tensor, *, steps: int | None = None) -> dict[str, Tensor]:
    """Numbers for each token, (batch, tokens), none of which knows the next token. The last two,
    the entropy of what the model says and minus its largest log-probability, need no energy: the
    others are to be compared with them.

    >>> import nrgpt, torch
    >>> from nrgpt.dynamics.meaning import signals
    >>> cfg = nrgpt.ModelConfig(vocab_size=65, context=32, width=16, heads=2, steps=8)
    >>> found = signals(nrgpt.LanguageModel(cfg), torch.randint(65, (2, 32)))
    >>> sorted(found)[:3]
    ['attention energy', 'energy', 'energy lost']
    """
    seen = trajectory(model, idx, steps=steps)
    assert seen.force is not None
    assert seen.entropy is not None
    total = seen.energies["total"]
    return {
        **{energy_name(term): energy[-1] for term, energy in seen.energies.items()},
        "energy lost": total[0] - total[-1],
        "last change of energy": (total[-1] - total[-2]).abs(),
        "force": seen.force[-1],
        "last move": seen.move[-1],
        "way": seen.move.sum(0),
        "size": seen.size[-1],
        "entropy": seen.entropy[-1],
        "surprise at itself": -seen.said()[1][-1, ..., 0].log(),
    }


@dataclass(frozen=True)
class Correlation:
    signal: str
    rank: float
    """Spearman's rank correlation with the token's loss."""


def correlations(
    model: Network, idx: Tensor, targets: Tensor, *, steps: int | None = None
) -> list[Correlation]:
    """The correlation of each signal with the loss, the strongest first."""
    loss = trajectory(model, idx, targets, steps, energies=False).loss
    assert loss is not None
    found = [
        Correlation(name, rank_correlation(value.flatten(), loss[-1].flatten()))
        for name, value in signals(model, idx, steps=steps).items()
    ]
    return sorted(found, key=lambda c: -abs(c.rank))


@dataclass(frozen=True)
class Detection:
    signal: str
    auroc: float
    """The probability that the signal of a strange text is above that of a familiar one. At 0.5 it
    tells nothing; below, strange texts have less of it."""


def detection(
    model: Network, familiar: Tensor, strange: Tensor, *, steps: int | None = None
) -> list[Detection]:
    """How well each signal's mean over a text tells strange texts (batch, tokens) from familiar
    ones; the best first, in either direction."""
    a, b = (signals(model, idx, steps=steps) for idx in (familiar, strange))
    found = [
        Detection(name, auroc(strange=b[name].mean(1), familiar=a[name].mean(1))) for name in a
    ]
    return sorted(found, key=lambda d: -abs(d.auroc - 0.5))


def corrupted(idx: Tensor, share: float, vocab_size: int, generator: torch.Generator) -> Tensor:
    """The same texts with a share of their tokens replaced by random ones."""
    check(0 <= share <= 1, "share", share, "in [0, 1]")
    new = torch.randint(vocab_size, idx.shape, generator=generator)
    changed = torch.rand(idx.shape, generator=generator) < share
    return torch.where(changed.to(idx.device), new.to(idx), idx)


def auroc(*, strange: Tensor, familiar: Tensor) -> float:
    """Area under the ROC curve, ties counted half."""
    ranks = average_ranks(torch.cat([strange, familiar]).double())
    n, m = len(strange), len(familiar)
    return ((ranks[:n].sum() - n * (n + 1) / 2) / (n * m)).item()


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's."""
    ranks = torch.stack([average_ranks(a.double()), average_ranks(b.double())])
    return torch.corrcoef(ranks)[0, 1].item()


def average_ranks(values: Tensor) -> Tensor:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, group, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[group]
