"""Does an energy know which of two sentences is right? BLiMP's pairs, asked of energies.

A sentence's energy is the sum, or the mean, of its tokens' energies after the last step. The right
one should have less. Beside the likelihood: is log p(sentence) - w E right more often than log p
alone, with the best w of one half of the pairs, on the other half?
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.tokenizer import start_of_text
from ..train.runs import Run

WEIGHTS = tuple(sign * 10**power for sign in (1, -1) for power in (-3, -2, -1, 0, 1))
"""Of the energy beside the likelihood, in units that make both spread alike."""


class Sentence(NamedTuple):
    likelihood: float
    energy: float
    mean_energy: float


@torch.no_grad()
def look(run: Run, texts: Sequence[str], *, steps: int | None, batch_size: int) -> list[Sentence]:
    """What a model says of each text: as the harness does, with the start of a text before it."""
    model = run.model
    encoded = [[start_of_text(run.tokenizer), *run.encode(text)] for text in texts]
    order = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
    starts = range(0, len(order), batch_size)
    found: dict[int, Sentence] = {}
    for begin in track(starts, "energies of sentences", disable=len(starts) < 2):
        rows = order[begin : begin + batch_size]
        tokens = [torch.tensor(encoded[i][-model.cfg.context - 1 :]) for i in rows]
        lengths = torch.tensor([len(t) - 1 for t in tokens])
        whole = pad_sequence(tokens, batch_first=True).to(model.tokens.device)
        idx, targets = whole[:, :-1], whole[:, 1:]
        states = model.states(idx, steps=steps, dropout=False)
        x = start = next(states)
        for x in states:  # noqa: B007
            pass
        energies = torch.stack(list(model.energies(x, start=start).values())).sum(0)
        there = torch.arange(idx.shape[1]) < lengths[:, None]
        chosen = model.readout(x).float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        sums = [(value.cpu().double() * there).sum(1) for value in (chosen, energies)]
        for i, likelihood, energy, length in zip(rows, *sums, lengths, strict=True):
            found[i] = Sentence(likelihood.item(), energy.item(), (energy / length).item())
    return [found[i] for i in range(len(texts))]


def preferences(
    run: Run, pairs: Sequence[Mapping[str, Any]], *, steps: int | None, batch_size: int
) -> dict[str, dict[str, float]]:
    """Shares of pairs whose good sentence is preferred, with standard errors; ties are wrong."""
    texts = [pair[name] for pair in pairs for name in ("sentence_good", "sentence_bad")]
    seen = torch.tensor(look(run, texts, steps=steps, batch_size=batch_size), dtype=torch.float64)
    likelihood, energy, mean = (seen[0::2] - seen[1::2]).unbind(1)  # good less bad
    odd = torch.arange(len(pairs)) % 2 == 1
    tiny = torch.finfo(torch.float64).tiny
    scaled = energy * likelihood.square().mean().sqrt() / energy.square().mean().sqrt().clamp(tiny)
    both = {w: likelihood - w * scaled for w in WEIGHTS}
    best = max(WEIGHTS, key=lambda w: int((both[w][~odd] > 0).sum()))
    found = {
        "energy": share(energy < 0),
        "energy per token": share(mean < 0),
        "likelihood, odd pairs": share(likelihood[odd] > 0),
        "likelihood and energy, odd pairs": share(both[best][odd] > 0) | {"weight": best},
    }
    return {name: value for name, value in found.items() if value["pairs"]}


def share(right: Tensor) -> dict[str, float]:
    value = right.double().sum().item() / max(1, len(right))
    error = (value * (1 - value) / max(1, len(right) - 1)) ** 0.5
    return {"value": value, "stderr": error, "pairs": float(len(right))}
