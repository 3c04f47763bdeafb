"""Texts of finished runs, and their metrics, as far as a machine has what these need."""

import functools
import json
import statistics
from pathlib import Path
from typing import Any

from ..evaluate.extras import MissingExtra
from ..evaluate.samples import human_texts, model_texts
from ..evaluate.text import TITLES, Measure, distinct_n, measures_to_load, text_metrics
from ..train.distributed import device_named
from ..train.runs import Run
from .common import Row, put_rows
from .records import Record, read
from .training import screen

FILE = "texts.json"

METRICS = ("perplexity", "gqs_paper", "cosine_similarity", "distinct_1", "distinct_2")
"""The paper's five, in the order of its tables."""


@functools.cache
def measures_here(judge: str | None, device: str) -> dict[str, Measure]:
    """The metrics that need other models; what cannot be had is said, and left out."""
    found = {}
    for name, load in measures_to_load(judge).items():
        try:
            found[name] = load(device)
        except ValueError as error:  # a model that cannot be loaded, or a missing package
            screen.print(f"left out: {error}", highlight=False, soft_wrap=True)
    return found


def keep_texts(run: Run, record: Record, *, samples: int, words: int) -> list[str]:
    """Texts of one length, the model's and people's, in the run's record: they can be measured
    wherever there is what that needs. Returns the model's."""
    tokens = run.dataset(verify=False).tokens("val")
    written = model_texts(run, number=samples, words=words)
    read = human_texts(tokens, run.tokenizer, number=samples, words=words)
    kept = {"words": words, "model": written, "people": read}
    record.files[FILE] = json.dumps(kept, indent=1).encode()
    return written


def with_metrics(rows: list[Row], to: Path, judge: str | None, quick: bool = False) -> list[Row]:
    """The rows, also on disk, with the metrics of their texts, as many as can be had here. Rows
    that have all, by this judge, stay as they are; nobody loses what it had."""

    def lacks(row: Row) -> bool:
        measured = row.get("metrics", {}).get("model", {})
        by = row.get("metrics_settings", {}).get("judge")
        is_whole = all(name in measured for name in METRICS)
        has_texts = FILE in records.get(row["case"], ())
        return has_texts and not (is_whole and (judge is None or by == Path(judge).name))

    records = read(to)
    if not any(map(lacks, rows)):
        return rows
    measures = {} if quick else measures_here(judge, device_named("auto"))
    rows = [
        measured_again(row, records[row["case"]].read(FILE), measures, judge) if lacks(row) else row
        for row in rows
    ]
    return put_rows(to, rows)


def measured_again(row: Row, kept: Row, measures: dict[str, Measure], judge: str | None) -> Row:
    """A row with {"metrics": means over texts by whose they are, ...}, new ones over old ones."""
    texts = {who: kept[who] for who in ("model", "people")}
    found: dict[str, dict[str, float]] = {}
    try:
        measured = text_metrics(texts, kept["words"], measures, judge or "none")
        for who, estimates in measured.estimates.items():
            found[who] = {name: estimates[name].mean for name in METRICS if name in estimates}
    except MissingExtra as error:
        screen.print(f"left out: {error}", highlight=False, soft_wrap=True)
        found = {who: without_packages(some, measures) for who, some in texts.items()}
    before = row.get("metrics", {})
    settings = {"samples": len(texts["model"]), "words": kept["words"]}
    settings["judge"] = row.get("metrics_settings", {}).get("judge")
    if judge is not None and "perplexity" in found["model"]:
        settings["judge"] = Path(judge).name
    metrics = {who: before.get(who, {}) | found[who] for who in found}
    return row | {"metrics": metrics, "metrics_settings": settings}


def without_packages(texts: list[str], measures: dict[str, Measure]) -> dict[str, float]:
    """All but grammar, which has packages of its own."""
    counted: dict[str, Measure] = {
        "distinct_1": lambda text: distinct_n(text, 1),
        "distinct_2": lambda text: distinct_n(text, 2),
    }
    found = {}
    for name, measure in (counted | measures).items():
        values = [value for text in texts if (value := measure(text)) is not None]
        if values:
            found[name] = statistics.fmean(values)
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
    all_of = [row.get("metrics", {}).get(who, {}) for row in rows]
    values = [metrics[name] for metrics in all_of if name in metrics]
    if not values:
        return "-"
    mean = sum(values) / len(values)
    return f"{mean:.0f}" if name == "perplexity" else f"{mean:.3f}"
