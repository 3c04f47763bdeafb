"""Texts of finished runs, and their metrics, as far as a machine has what these need."""

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

from ..evaluate.extras import MissingExtra
from ..evaluate.samples import human_texts, model_texts
from ..evaluate.text import TITLES, Estimate, Measure, distinct_n, load_measures, text_metrics
from ..runs import Run
from ..train.checkpoint import write_atomically
from ..train.distributed import device_named
from .common import Row, write_rows
from .training import screen

FILE = "texts.json"

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


def keep_texts(run: Run, record: Path, *, samples: int, words: int) -> list[str]:
    """Texts of one length, the model's and people's, in the run's record: they can be measured
    wherever there is what that needs. Returns the model's."""
    tokens = run.dataset(verify=False).tokens("val")
    written = model_texts(run, number=samples, words=words)
    read = human_texts(tokens, run.tokenizer, number=samples, words=words)
    kept = {"words": words, "model": written, "people": read}
    write_atomically(record / FILE, json.dumps(kept, indent=1) + "\n")
    return written


def with_metrics(rows: list[Row], to: Path, judge: str | None, quick: bool = False) -> list[Row]:
    """The rows, also on disk, with the metrics of their texts, as many as can be had here. Rows
    that have all stay as they are."""

    def lacks(row: Row) -> bool:
        measured = row.get("metrics", {}).get("model", {})
        has_texts = (to / "runs" / row["case"] / FILE).exists()
        return has_texts and any(name not in measured for name in METRICS)

    if not any(map(lacks, rows)):
        return rows
    measures = {} if quick else measures_here(judge, device_named("auto"))
    rows = [
        row | metrics_of(to / "runs" / row["case"] / FILE, measures, judge) if lacks(row) else row
        for row in rows
    ]
    write_rows(to, rows)
    return rows


def metrics_of(path: Path, measures: dict[str, Measure], judge: str | None) -> Row:
    """Means over texts: {"metrics": {...}}."""
    kept = json.loads(path.read_text())
    texts = {who: kept[who] for who in ("model", "people")}
    found: dict[str, dict[str, float]] = {}
    try:
        measured = text_metrics(texts, kept["words"], measures, judge or "none")
        for who, estimates in measured.estimates.items():
            found[who] = {name: estimates[name].mean for name in METRICS if name in estimates}
    except MissingExtra as error:
        screen.print(f"left out: {error}", highlight=False, soft_wrap=True)
        found = {who: plain(some) for who, some in texts.items()}
    settings = {"samples": len(texts["model"]), "words": kept["words"]}
    named = Path(judge).name if judge is not None and "perplexity" in measures else None
    return {"metrics": found, "metrics_settings": {**settings, "judge": named}}


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
