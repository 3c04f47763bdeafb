"""Does the energy mean anything? Correlations with the loss, and detection of strange texts, beside
what any language model has: the readout's entropy and largest probability."""

import random
import re
from pathlib import Path
from typing import Any

import torch
from common import Results, Study, batches, show, token_losses, windows
from torch import Tensor

from nrgpt.dynamics.figures import new_figure, save
from nrgpt.dynamics.meaning import auroc, corrupted, rank_correlation, signals
from nrgpt.train.runs import Run

LENGTHS = (32, 128)
"""Of the texts that are to be told apart: the longer, the easier."""
REPOSITORY = Path(__file__).parents[2]


def meaning(study: Study) -> None:
    """Of validation texts, and of texts that are not what the model was trained on."""
    results = Results(study.to / "meaning.json")
    for run in study.open():
        text = windows(run, study.size(study.tokens or 32_768, 256))
        found = by_batch(run, text)
        losses = found.pop("loss")
        ranks = {
            name: rank_correlation(value.flatten(), losses.flatten())
            for name, value in found.items()
        }
        ranks = dict(sorted(ranks.items(), key=lambda item: -abs(item[1])))
        results.add(run, "tokens", losses.numel())
        results.add(run, "rank correlation with the loss", ranks)
        rows = [[name, rank] for name, rank in ranks.items()]
        show(f"{run.folder.name}: rank correlation with the loss", ["signal", "rank"], rows)
        tables: dict[str, Any] = {}
        for length in [n for n in LENGTHS if n <= run.cfg.model.context]:
            count = study.size(300, 6)
            familiar = familiar_texts(run, count, length)
            a = by_batch(run, familiar)
            for kind, strange in strange_texts(run, familiar).items():
                b = by_batch(run, strange)
                tables[f"{kind}, {length} tokens"] = {
                    name: auroc(strange=b[name].mean(1), familiar=a[name].mean(1)) for name in a
                }
                results.add(run, "AUROC", tables)
        results.add(run, "texts of each kind", len(familiar))
        draw(study, run.folder.name, tables)
        best = [[kind, *top(scores)] for kind, scores in tables.items()]
        headings = [
            "strange texts",
            "best of the energy's",
            "AUROC",
            "entropy",
            "max probability",
            "loss",
        ]
        show(f"{run.folder.name}: detection", headings, best)


@torch.no_grad()
def by_batch(run: Run, text: Tensor) -> dict[str, Tensor]:
    """The signals of all tokens of texts but the last, and the loss on the next one. The loss is
    the plainest signal of all: it only has to wait for the text to go on."""
    parts: list[dict[str, Tensor]] = []
    for idx, targets in batches(text):
        losses = token_losses(run.model(idx)[0], targets)
        parts.append(signals(run.model, idx) | {"loss": losses})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def familiar_texts(run: Run, count: int, length: int) -> Tensor:
    """Spread over the validation split."""
    stream = run.dataset(verify=False).tokens("val")
    step = max(1, (len(stream) - length) // count)
    rows = [torch.from_numpy(stream.read(i * step, length)) for i in range(count)]
    return torch.stack(rows).to(run.model.tokens.device)


def strange_texts(run: Run, familiar: Tensor) -> dict[str, Tensor]:
    """The same texts, spoilt in several ways, and texts of another kind."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = run.tokenizer.vocab_size
    shape = familiar.shape
    order = torch.stack([torch.randperm(shape[1], generator=generator) for _ in range(shape[0])])
    kinds = {
        "2 % of tokens changed": corrupted(familiar, 0.02, vocabulary, generator),
        "10 % of tokens changed": corrupted(familiar, 0.1, vocabulary, generator),
        "reversed": familiar.flip(1),
        "tokens shuffled": familiar.gather(1, order.to(familiar.device)),
        "random tokens": torch.randint(vocabulary, shape, generator=generator).to(familiar),
    }
    if run.cfg.data.task == "shakespeare":
        rng = random.Random(0)
        rows = [run.encode(shuffled_words(run.decode(row), rng)) for row in familiar.tolist()]
        kinds["words shuffled"] = torch.tensor(rows).to(familiar)
        modern = modern_english(run)
        starts = torch.arange(shape[0]) * ((len(modern) - shape[1]) // shape[0])
        rows = [modern[start : start + shape[1]] for start in starts.tolist()]
        kinds["modern English"] = torch.tensor(rows).to(familiar)
    return kinds


def shuffled_words(text: str, rng: random.Random) -> str:
    """The same words and the same gaps, the words in another order."""
    parts = re.split(r"([A-Za-z']+)", text)
    words = parts[1::2]
    rng.shuffle(words)
    parts[1::2] = words
    return "".join(parts)


def modern_english(run: Run) -> list[int]:
    """This repository's own documents, their words and whatever else Shakespeare knows."""
    files = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    text = re.sub(r"```.*?```|\|.*\|", " ", text, flags=re.DOTALL)  # neither code nor tables
    known = {run.decode([i]) for i in range(run.tokenizer.vocab_size)}
    text = "".join(c if c in known else " " for c in text)
    return run.encode(re.sub(r" +", " ", text))


PLAIN = ("entropy", "surprise at itself", "loss")
"""Signals that need no energy."""


def top(scores: dict[str, float]) -> list[Any]:
    """The best signal of the energy (chosen after the fact, which flatters it a little), how well
    it tells, and how well the plain ones do."""
    own = {name: value for name, value in scores.items() if name not in PLAIN}
    best = max(own, key=lambda name: abs(own[name] - 0.5))
    return [best, own[best], *(scores[name] for name in PLAIN)]


def draw(study: Study, name: str, tables: dict[str, dict[str, float]]) -> None:
    figure = new_figure(0.9 * len(next(iter(tables.values()))) + 4, 0.4 * len(tables) + 2.5)
    axis = figure.subplots()
    names = list(next(iter(tables.values())))
    values = torch.tensor([[scores[n] for n in names] for scores in tables.values()])
    image = axis.imshow(values.numpy(), cmap="RdBu_r", vmin=0, vmax=1, aspect="auto")
    axis.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    axis.set_yticks(range(len(tables)), list(tables), fontsize=8)
    for (row, column), value in (
        ((r, c), float(values[r, c])) for r in range(len(values)) for c in range(len(names))
    ):
        colour = "white" if abs(value - 0.5) > 0.35 else "black"
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, label="AUROC (0.5: of no use)")
    save(figure, study.to / f"meaning-{name}", ("png",))
