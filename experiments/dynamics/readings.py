"""Is a low energy a good reading? Tokens start from several states, in the field of a past that
stands still: of their ends, does the lowest say it best? And the minima below them: what do those
say, and are they alternative readings?"""

from typing import Any

import torch
import torch.nn.functional as F
from common import Mean, Results, Study, mean, show, token_losses
from rich.progress import track
from torch import Tensor

from nrgpt.dynamics.field import Field
from nrgpt.dynamics.landscape import TokenLandscape
from nrgpt.dynamics.paths import basins
from nrgpt.language_model import LanguageModel
from nrgpt.train.runs import Run

NOISES = (0.03, 0.1, 0.3, 1.0)
"""Of a start, as multiples of its own size."""
TOP = 3


def texts_of(study: Study, run: Run) -> tuple[Tensor, Tensor]:
    """The first texts of the validation split, and their targets."""
    texts, length = study.size(64, 2), min(study.size(64, 16), run.model.cfg.context)
    count = texts * length + 1
    tokens = torch.from_numpy(run.first_tokens("val", count).read(0, count))
    return tokens[:-1].view(texts, length), tokens[1:].view(texts, length)


@torch.no_grad()
def readings(study: Study) -> None:
    results = Results(study.to / "readings.json")
    for run in study.open():
        idx, targets = texts_of(study, run)
        results.add(run, "tokens", idx.numel())
        found = []
        for noise in NOISES[:: 3 if study.quick else 1]:
            found.append(from_several(run.model, idx, targets, noise, study.size(8, 3)))
            results.add(run, "starts", found)
        headings = [name for name in found[0] if "±" not in name]
        show(f"{run.folder.name}: starts", headings, [[e[h] for h in headings] for e in found])
        results.add(run, "minima", minima(study, run, idx, targets))


def from_several(
    model: LanguageModel, idx: Tensor, targets: Tensor, noise: float, starts: int
) -> dict[str, Any]:
    """The model's own start and noisy ones: the losses of where each ends, of the lowest end of
    each token, of probabilities averaged over all, and of the best end in hindsight."""
    generator = torch.Generator().manual_seed(0)
    start = model.begin(idx)
    *_, usual = model.states(idx)
    field = Field(model, start, past=usual)
    energies, logits = [], []
    for i in track(range(starts), f"noise {noise:g}", transient=True):
        x = start
        if i:
            size = start.norm(dim=-1, keepdim=True) / start.shape[-1] ** 0.5
            x = x + noise * size * torch.randn(x.shape, generator=generator)
        for state, _ in field.roll(x, model.cfg.steps + 1):
            x = state
        energies.append(field.energy(x))
        logits.append(model.readout(x))
    energy = torch.stack(energies)
    losses = torch.stack([token_losses(said, targets) for said in logits])
    lowest = energy.argmin(0, keepdim=True)
    together = torch.stack(logits).log_softmax(-1).logsumexp(0) - torch.tensor(starts).log()
    ways: dict[str, Mean] = {
        "own start": mean(losses[0]),
        "noisy starts": mean(losses[1:].mean(0)),
        "lowest end": mean(losses.gather(0, lowest)[0]),
        "averaged": mean(token_losses(together, targets)),
        "best in hindsight": mean(losses.amin(0)),
        "lowest against own": mean(losses.gather(0, lowest)[0] - losses[0]),
    }
    row: dict[str, Any] = {"noise": noise, "starts": starts}
    for name, found in ways.items():
        row |= {name: found.value, f"{name} ±": found.error}
    row["own end is lowest"] = (lowest == 0).double().mean().item()
    row["ends apart by"] = (energy.std(0) / energy.mean(0).abs()).mean().item()
    return row


def minima(study: Study, run: Run, idx: Tensor, targets: Tensor) -> dict[str, Any]:
    """Of single tokens: the minima that random starts and their own end lead to, what these say,
    and how that compares with what the model says where it stops."""
    model = run.model.double()
    tokens = study.size(48, 2)
    places = torch.linspace(2, idx.numel() - 1, tokens).long()
    rows = []
    for place in track(places.tolist(), "minima", transient=True):
        text, token = divmod(place, idx.shape[1])
        land = TokenLandscape(model, idx[text : text + 1], max(token, 1))
        generator = torch.Generator().manual_seed(place)
        way = land.trajectory()
        points = torch.cat([way[-1:], land.random_points(study.size(12, 2), generator)])
        iterations = study.size(3_000, 20)
        found = basins(land, land.surface, points, distance=0.02, iterations=iterations)
        target = targets[text, max(token, 1)]
        end = model.readout(way[-1:]).log_softmax(-1)[0]
        said = model.readout(found.minima).log_softmax(-1)
        below, lowest = int(found.of_start[0]), int(found.energy.argmin())
        top = said.argmax(-1)
        likely = set(end.topk(TOP).indices.tolist())
        rows.append(
            {
                "minima": len(found.energy),
                "symbols said by them": len(set(top.tolist())),
                "loss at the end": -end[target].item(),
                "loss below the end": -said[below, target].item(),
                "loss in the lowest": -said[lowest, target].item(),
                "below says what the end says": float(top[below] == end.argmax()),
                f"minima that say one of the end's {TOP} likeliest": sum(
                    n in likely for n in top.tolist()
                )
                / len(top),
                "entropy at the end": -(end.exp() * end).sum().item(),
                "entropy in minima": -(said.exp() * said).sum(-1).mean().item(),
                "some minimum says what came": float((top == target).any()),
                "the end says what came": float(end.argmax() == target),
                "loss of minima, weighted alike": F.cross_entropy(
                    said.logsumexp(0)[None] - torch.tensor(len(said)).log(), target[None]
                ).item(),
            }
        )
    return {"tokens": len(rows)} | {
        name: sum(row[name] for row in rows) / len(rows) for name in rows[0]
    }
