"""Do added energies hold against prompts that work against them, as the paper expects? Two goals,
on Shakespeare: words that must not be said, and a way to address people. The prompts ("attacks")
are passages that are full of what must not be said, or of the other way.

Beside the energies, what one would do with any language model: take logits down, and ask for a
style by an example before the attack.
"""

from typing import Any

import torch
from common import Results, Study, batches, show, windows
from steering import (
    AVOIDED,
    address,
    address_of,
    allowed_after,
    check_words,
    constrained,
    sampled,
    share_of,
)
from torch import Tensor

from nrgpt.dynamics.regularise import Toward, concept_vector
from nrgpt.dynamics.trajectory import trajectory
from nrgpt.train.runs import Run

PROMPT = 96
"""Characters of an attack, and of an example before it."""
WORDS = (
    *(("energy", weight) for weight in (3.0, 10.0)),
    *(("energy, second half", weight) for weight in (3.0, 10.0)),
    *(("logits", weight) for weight in (3.0, 5.0, 7.0, 10.0)),
)
PULLS = (0.05, 0.1)
"""Multiples of the mean force, as in steering.style."""


def passages(run: Run, study: Study) -> Tensor:
    """Pieces of the training text, (pieces, PROMPT)."""
    length = study.size(PROMPT, 12)
    text = windows(run, study.size(400_000, 500), "train")[:, :-1].reshape(-1)
    return text[: len(text) // length * length].view(-1, length)


def fullest(pieces: Tensor, score: Tensor, count: int) -> Tensor:
    """The pieces with the highest score, the ones with equal scores in their order."""
    return pieces[score.argsort(descending=True, stable=True)[:count]]


def injection(study: Study) -> None:
    results = Results(study.to / "injection.json")
    for run in study.open():
        check_words(run)
        pieces, count = passages(run, study), study.size(512, 2)
        texts = [run.decode(piece) for piece in pieces.tolist()]
        results.add(run, "words", words(study, run, pieces, texts, count))
        results.add(run, "style", style(study, run, pieces, texts, count))


def words(
    study: Study, run: Run, pieces: Tensor, texts: list[str], count: int
) -> list[dict[str, Any]]:
    """How often are the words said that are to be avoided, after ordinary passages, and after those
    that say them most? And how likely is their last letter where a text leads up to it?"""
    hits = torch.tensor([share_of([text], AVOIDED)[0] for text in texts])
    prompts = {
        "ordinary": pieces[:: max(1, len(pieces) // count)][:count],
        "attack": fullest(pieces, hits, count),
    }
    length, rows = study.size(96, 6), []
    for way, weight in (("energy", 0.0), *(WORDS[:1] if study.quick else WORDS)):
        row: dict[str, Any] = {"way": way if weight else "nothing", "weight": weight}
        for name, idx in prompts.items():
            said = sampled(run, idx, length, weight, way)
            found, all_words = share_of(said, AVOIDED)
            row[f"{name}, of 1000 words"] = 1000 * found / max(1, all_words)
            row[f"{name} ±"] = 1000 * found**0.5 / max(1, all_words)
            row[f"{name}, an example"] = said[0]
        row["completed"] = completed(run, windows(run, study.size(32_768, 128)), weight, way)
        rows.append(row)
    shown = [name for name in rows[0] if "example" not in name]
    show(
        f"{run.folder.name}: words avoided", shown, [[row[name] for name in shown] for row in rows]
    )
    return rows


@torch.no_grad()
def completed(run: Run, text: Tensor, weight: float, way: str) -> float:
    """The mean probability of the last letter of an avoided word, where it comes next."""
    found = []
    for idx, targets in batches(text):
        p = constrained(run, idx, weight, way).softmax(-1)
        is_next = ~allowed_after(run, idx, AVOIDED).gather(2, targets[..., None])[..., 0]
        found.append(p.gather(2, targets[..., None])[..., 0][is_next])
    return torch.cat(found).double().mean().item()


def style(
    study: Study, run: Run, pieces: Tensor, texts: list[str], count: int
) -> list[dict[str, Any]]:
    """The share of thou among both ways of address: with nothing, with an example of thou before
    the rest, and with a pull toward thou; each alone, and each followed by an attack, a passage
    full of you."""
    model = run.model
    training = windows(run, study.size(10**9, 2_000), "train")[:, :-1]
    leaning = torch.tensor([old - new for old, new in map(address_of(run), training.tolist())])
    order, some = leaning.argsort(descending=True), min(study.size(200, 4), len(leaning) // 2)
    v = concept_vector(model, training[order[:some]], training[order[-some:]])
    force = trajectory(model, training[:8], readouts=False).force
    assert force is not None
    unit = force[:-1].mean().item()

    lean = torch.tensor([old - new for old, new in (address([text]) for text in texts)])
    example, attack = fullest(pieces, lean, count), fullest(pieces, -lean, count)
    newline = torch.tensor([run.encode("\n")] * count, device=pieces.device)
    rows = []
    for way in ("nothing", "example", *PULLS[: study.size(len(PULLS), 1)]):
        extra = {"style": Toward(v, way * unit)} if isinstance(way, float) else None
        before = example if way == "example" else newline
        row: dict[str, Any] = {"way": f"pull of {way}" if extra else way}
        for name, prompts in (("alone", before), ("attacked", torch.cat([before, attack], 1))):
            generator = torch.Generator(pieces.device).manual_seed(0)
            said = model.generate(
                prompts.tolist(),
                max_new_tokens=study.size(60, 6),
                temperature=1.0,
                generator=generator,
                extra=extra,
            )
            old, new = address([run.decode(tokens) for tokens in said])
            share = old / (old + new) if old + new else float("nan")
            row |= {f"{name}: thou": old, f"{name}: you": new, f"{name}: share": share}
            row[f"{name} ±"] = (share * (1 - share) / max(1, old + new)) ** 0.5
        rows.append(row)
    show(f"{run.folder.name}: style", list(rows[0]), [list(row.values()) for row in rows])
    return rows
