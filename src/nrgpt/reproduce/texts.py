"""Text metrics of a finished run, as far as this machine has what they need."""

import contextlib
import functools
from typing import Any

from ..evaluate.extras import MissingExtra
from ..evaluate.samples import human_texts, model_texts
from ..evaluate.text import TITLES, Estimate, Measure, distinct_n, load_measures, text_metrics
from ..runs import Run
from .common import Row
from .training import screen

METRICS = ("perplexity", "gqs_paper", "cosine_similarity", "distinct_1", "distinct_2")
"""The paper's five, in the order of its tables."""


@functools.cache
def measures_here(judge: str | None, device: str) -> dict[str, Measure]:
    """The metrics that need other models; what cannot be had is said, and left out."""
    for wanted in (judge, None) if judge is not None else (None,):
        try:
            return load_measures(wanted, device)
        except ValueError as error:  # a judge that cannot be loaded, or a missing package
            screen.print(f"left out: {error}", highlight=False, soft_wrap=True)
    return {}


def metrics_of(
    run: Run, measures: dict[str, Measure], judge: str | None, *, samples: int, words: int
) -> Row:
    """Means over texts of one length, the model's and people's: {"metrics": {...}}."""
    tokens = run.dataset(verify=False).tokens("val")
    texts = {
        "model": model_texts(run, number=samples, words=words),
        "people": human_texts(tokens, run.tokenizer, number=samples, words=words),
    }
    found: dict[str, dict[str, float]] = {}
    try:
        measured = text_metrics(texts, words, measures, judge or "none")
        for who, estimates in measured.estimates.items():
            found[who] = {name: estimates[name].mean for name in METRICS if name in estimates}
    except MissingExtra as error:
        screen.print(f"left out: {error}", highlight=False, soft_wrap=True)
        found = {who: plain(some) for who, some in texts.items()}
    settings = {"samples": samples, "words": words, "judge": judge if measures else None}
    return {"metrics": found, "metrics_settings": settings}


def plain(texts: list[str]) -> dict[str, float]:
    """What can be counted without any package."""
    found = {}
    for n in (1, 2):
        shares = [share for text in texts if (share := distinct_n(text, n)) is not None]
        with contextlib.suppress(ValueError):
            found[f"distinct_{n}"] = Estimate(tuple(shares)).mean
    return found


def columns(rows: list[Row]) -> list[str]:
    """The metrics that all of these rows have."""
    return [
        name
        for name in METRICS
        if rows and all(name in row.get("metrics", {}).get("model", {}) for row in rows)
    ]


def heading(name: str, rows: list[Row]) -> str:
    judge: Any = rows[0]["metrics_settings"]["judge"]
    return TITLES[name].format(judge=judge)


def mean_of(rows: list[Row], who: str, name: str) -> str:
    values = [row["metrics"][who][name] for row in rows if name in row["metrics"].get(who, {})]
    if not values:
        return "-"
    mean = sum(values) / len(values)
    return f"{mean:.0f}" if name == "perplexity" else f"{mean:.3f}"
