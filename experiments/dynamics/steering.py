"""Energy regularisers on Shakespeare: avoid words, keep a style. What do they do, and what do they
cost in loss?"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import Results, Study, batches, mean, show, token_losses, windows
from rich.progress import track
from torch import Tensor

from nrgpt.decode.decoder import Decoder
from nrgpt.dynamics.figures import new_figure, save
from nrgpt.dynamics.regularise import Regulariser, Says, Toward, concept_vector
from nrgpt.dynamics.schedules import Schedule, switch_on
from nrgpt.dynamics.trajectory import trajectory
from nrgpt.language_model import LanguageModel
from nrgpt.model.past import Past
from nrgpt.train.runs import Run

AVOIDED = ("thou", "thee", "thy", "king", "lord", "love")
WAYS = ("energy", "energy, second half", "logits")
OLD, NEW = ("thou", "thee", "thy", "thine"), ("you", "your", "yours")


class AllowedNext(Regulariser):
    """E_A = -weight log P(the next token is one of those allowed after token A), read out of g.

    ``allowed`` is (batch, tokens, vocabulary): another set for each place, so this is for passes
    over whole texts. Where everything is allowed E is zero, and so is the force.
    """

    forbidden: Tensor

    def __init__(self, model: LanguageModel, allowed: Tensor, weight: float | Schedule):
        super().__init__(weight)
        self.says = Says(model, [0], 1.0)  # knows how to read out of g
        self.register_buffer("forbidden", ~allowed)

    def energy(self, z: Tensor, past: Past) -> Tensor:
        logits = self.says.logits(z)
        among = logits.masked_fill(self.forbidden, float("-inf")).logsumexp(-1)
        return self.weight_at(past) * (logits.logsumexp(-1) - among)

    def force(self, z: Tensor, past: Past) -> Tensor:
        logits = self.says.logits(z)
        among = logits.masked_fill(self.forbidden, float("-inf")).softmax(-1)
        return self.weight_at(past) * ((among - logits.softmax(-1)) @ self.says.head)


def completing(text: str, words: Sequence[str], symbols: Sequence[str]) -> dict[int, list[int]]:
    """For each place of a text after which one letter would complete one of the words: the tokens
    of that letter, small and large."""
    number = {symbol: i for i, symbol in enumerate(symbols)}
    last = {word[:-1]: word[-1] for word in words}
    found: dict[int, list[int]] = {}
    for match in re.finditer(r"[A-Za-z]+", text):
        for beginning, letter in last.items():
            if match.group().lower().startswith(beginning):
                place = match.start() + len(beginning) - 1
                cases = (number.get(letter), number.get(letter.upper()))
                found.setdefault(place, []).extend(c for c in cases if c is not None)
    return found


def allowed_after(run: Run, idx: Tensor, words: Sequence[str]) -> Tensor:
    """Which tokens do not complete one of the words: (batch, tokens, vocabulary)."""
    symbols = [run.decode([i]) for i in range(run.tokenizer.vocab_size)]
    allowed = torch.ones(*idx.shape, run.model.cfg.vocab_size, dtype=torch.bool)
    for row, tokens in enumerate(idx.tolist()):
        for place, letters in completing(run.decode(tokens), words, symbols).items():
            allowed[row, place, letters] = False
    return allowed.to(idx.device)


def check_words(run: Run) -> None:
    if run.cfg.data.task != "shakespeare":
        raise ValueError(f"{run.folder} knows {run.cfg.data.task}; this part is about words")


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def share_of(texts: Sequence[str], words: Sequence[str]) -> tuple[int, int]:
    """How many words of these texts begin with one of the given ones, and how many there are."""
    everything = [word for text in texts for word in words_of(text)]
    return sum(word.startswith(tuple(words)) for word in everything), len(everything)


def avoid(study: Study) -> None:
    """Avoid a set of words (whatever begins with them): how often does the model still say them,
    and what does text cost that does not have them, and text that does? The energy acts at all
    steps, or in the second half of them. Beside it, the plain way: taking the same letters' logits
    down after the last step."""
    results = Results(study.to / "avoid.json")
    weights = [1.0] if study.quick else [1.0, 3.0, 10.0, 30.0, 100.0]
    for run in study.open():
        check_words(run)
        text = windows(run, study.size(study.tokens or 32_768, 128))
        free = avoided(study, run, text, 0.0, "energy")
        lines: dict[str, list[dict[str, Any]]] = {way: [free] for way in WAYS}
        for way, line in lines.items():
            for weight in weights:
                line.append(avoided(study, run, text, weight, way))
                results.add(run, "words", AVOIDED)
                results.add(run, "avoided by", lines)
            rows = [
                [
                    e["weight"],
                    e["per 1000 words"],
                    e["±"],
                    e["loss elsewhere"],
                    e["loss where avoided"],
                ]
                for e in line
            ]
            headings = ["weight", "of 1000 words", "±", "loss elsewhere", "loss where avoided"]
            show(f"{run.folder.name}: words avoided by {way}", headings, rows)
        panels = {
            "avoided words, of 1000 sampled": ("per 1000 words", "±"),
            "loss elsewhere (nats)": ("loss elsewhere", ""),
        }
        by_weight(study.to / f"avoid-{run.folder.name}", lines, "weight", panels)


@torch.no_grad()
def avoided(study: Study, run: Run, text: Tensor, weight: float, way: str) -> dict[str, Any]:
    losses, here = [], []
    for idx, targets in batches(text):
        logits = constrained(run, idx, weight, way)
        losses.append(token_losses(logits, targets))
        allowed = allowed_after(run, idx, AVOIDED).cpu()
        here.append(~allowed.gather(2, targets.cpu()[..., None])[..., 0])
    loss, is_avoided = torch.cat(losses), torch.cat(here)
    length = study.size(run.model.cfg.context, 12)
    prompts = torch.tensor([run.encode("\n")] * study.size(128, 2), device=text.device)
    said = sampled(run, prompts, length - 1, weight, way)
    hits, words = share_of(said, AVOIDED)
    return {
        "weight": weight,
        "per 1000 words": 1000 * hits / max(1, words),
        "±": 1000 * hits**0.5 / max(1, words),  # as if hits were independent
        "hits": hits,
        "words": words,
        "loss": mean(loss).value,
        "loss elsewhere": loss[~is_avoided].mean().item(),
        "loss where avoided": loss[is_avoided].mean().item(),
        "an example": said[0],
    }


def avoiding(run: Run, allowed: Tensor, weight: float, way: str) -> AllowedNext:
    """The term of one of the ways; its weight is zero where the logits are taken down instead."""
    at: dict[str, float | Schedule] = {
        "energy": weight,
        "energy, second half": switch_on(run.model.cfg.steps // 2, weight),
        "logits": 0.0,
    }
    return AllowedNext(run.model, allowed, at[way])


def constrained(run: Run, idx: Tensor, weight: float, way: str) -> Tensor:
    """Logits of texts, with the words avoided in one way or the other."""
    allowed = allowed_after(run, idx, AVOIDED)
    term = avoiding(run, allowed, weight, way)
    logits = run.model(idx, extra={"allowed": term})[0]
    return logits - weight * ~allowed if way == "logits" else logits


@torch.no_grad()
def sampled(run: Run, idx: Tensor, length: int, weight: float, way: str) -> list[str]:
    """``length`` tokens that continue each of the prompts idx, sampled one by one. What is allowed
    after a token depends on the text up to it alone, so earlier tokens are kept in a cache, and the
    term is told what holds after the latest."""
    generator = torch.Generator(idx.device).manual_seed(0)
    prompt = idx.shape[1]
    term = avoiding(run, allowed_after(run, idx, AVOIDED), weight, way)
    decoder = Decoder(run.model, idx.tolist(), "exact", None, {"allowed": term})
    for number in track(range(length), f"sampling, {way}, weight {weight:g}"):
        # The last letters will do: none of the words is longer.
        forbidden = ~allowed_after(run, idx[:, -8:], AVOIDED)[:, -1:]
        if number > 0:  # the first pass is over the whole prompt
            term.forbidden = forbidden
        logits = decoder.next_logits()
        if way == "logits":
            logits = logits - weight * forbidden[:, 0]
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        decoder.feed(chosen[:, 0])
        idx = torch.cat([idx, chosen], 1)
    return [run.decode(row) for row in idx[:, prompt:].tolist()]


# Style -------------------------------------------------------------------------------------------


def address(texts: Sequence[str]) -> tuple[int, int]:
    """Old and new ways to address somebody, counted."""
    words = [word for text in texts for word in words_of(text)]
    return sum(word in OLD for word in words), sum(word in NEW for word in words)


def style(study: Study) -> None:
    """A concept vector from texts that say thou against texts that say you, as a constant pull on
    every token. Does the share of thou among both follow the weight, and what does it cost? The
    weight is a multiple of the mean force that the model has by itself."""
    results = Results(study.to / "style.json")
    scales = [0.0, 0.1] if study.quick else [-0.3, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.3]
    for run in study.open():
        check_words(run)
        model = run.model
        training = windows(run, study.size(10**9, 2_000), "train")[:, :-1]
        leaning = torch.tensor([old - new for old, new in map(address_of(run), training.tolist())])
        order = leaning.argsort(descending=True)
        count = min(study.size(200, 4), len(order) // 2)
        having, lacking = training[order[:count]], training[order[-count:]]
        v = concept_vector(model, having, lacking)
        text = windows(run, study.size(study.tokens or 32_768, 128))
        force = trajectory(model, text[:8, :-1], readouts=False).force
        assert force is not None
        unit = force[:-1].mean().item()
        results.add(run, "mean force", unit)
        results.add(run, "mean lean of the texts", leaning[order[:count]].double().mean().item())
        line: list[dict[str, Any]] = []
        for scale in scales:
            line.append(styled(study, run, text, v, scale, unit))
            results.add(run, "by weight", line)
        headings = ["weight", "thou forms", "you forms", "share of thou", "±", "loss", "±"]
        rows = [
            [e["scale"], e["old"], e["new"], e["share"], e["share ±"], e["loss"], e["loss ±"]]
            for e in line
        ]
        show(f"{run.folder.name}: toward thou", headings, rows)
        panels = {
            "share of thou in samples": ("share", "share ±"),
            "validation loss (nats)": ("loss", ""),
        }
        by_weight(study.to / f"style-{run.folder.name}", {"toward thou": line}, "scale", panels)


def address_of(run: Run) -> Any:
    return lambda tokens: address([run.decode(tokens)])


@torch.no_grad()
def styled(
    study: Study, run: Run, text: Tensor, v: Tensor, scale: float, unit: float
) -> dict[str, Any]:
    model = run.model
    extra = {"style": Toward(v, scale * unit)}
    losses = [token_losses(model(idx, extra=extra)[0], t) for idx, t in batches(text)]
    rows, length = study.size(128, 2), study.size(model.cfg.context - 1, 12)
    generator = torch.Generator(model.tokens.device).manual_seed(0)
    said = model.generate(
        [run.encode("\n")] * rows,
        max_new_tokens=length,
        temperature=1.0,
        generator=generator,
        extra=extra,
    )
    texts = [run.decode(tokens) for tokens in said]
    old, new = address(texts)
    share = old / (old + new) if old + new else float("nan")
    loss = mean(torch.cat(losses))
    return {
        "scale": scale,
        "weight": scale * unit,
        "old": old,
        "new": new,
        "share": share,
        "share ±": (share * (1 - share) / (old + new)) ** 0.5 if old + new else float("nan"),
        "loss": loss.value,
        "loss ±": loss.error,
        "an example": texts[0],
    }


def by_weight(
    file: Path, lines: dict[str, list[dict[str, Any]]], key: str, panels: dict[str, tuple[str, str]]
) -> None:
    """What the weights do, and what they cost: a panel for each label, of a value and its error
    (or "", for none)."""
    figure = new_figure(10, 3.8)
    for axis, (label, (value, error)) in zip(
        figure.subplots(1, len(panels)), panels.items(), strict=True
    ):
        for i, (name, line) in enumerate(lines.items()):
            at = [place + 0.06 * i for place in range(len(line))]  # errors beside one another
            errors = [entry[error] for entry in line] if error else None
            values = [entry[value] for entry in line]
            axis.errorbar(at, values, errors, marker="o", markersize=5, capsize=3, label=name)
        weights = [f"{entry[key]:g}" for entry in next(iter(lines.values()))]
        axis.set_xticks(range(len(weights)), weights)
        axis.set(xlabel="weight", ylabel=label)
        axis.grid(alpha=0.3)
    if len(lines) > 1:
        figure.axes[-1].legend()
    save(figure, file, ("png",))
