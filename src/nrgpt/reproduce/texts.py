"""Texts of finished runs, and their metrics, as far as a machine has what these need."""

import functools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..evaluate.grammar import grammar
from ..evaluate.samples import human_texts, model_texts
from ..evaluate.text import TITLES, Measure, distinct_n, measures_to_load
from ..train.distributed import device_named
from ..train.runs import Run
from .common import put_rows
from .records import Record, read
from .tables import Column, Row
from .training import screen

FILE = "texts.json"
T = TypeVar("T")

METRICS = ("perplexity", "gqs_paper", "cosine_similarity", "distinct_1", "distinct_2")
"""The paper's five, in the order of its tables."""


COUNTED: dict[str, Measure] = {
    "distinct_1": functools.partial(distinct_n, n=1),
    "distinct_2": functools.partial(distinct_n, n=2),
}


@functools.cache
def measures_here(judge: str | None, device: str) -> dict[str, Measure]:
    """The metrics that need other models; what cannot be had is said, and left out."""
    return {
        name: measure
        for name, load in measures_to_load(judge).items()
        if (measure := unless_missing(functools.partial(load, device))) is not None
    }


def grammar_here() -> dict[str, Measure]:
    """The same for grammar, which needs packages of its own."""

    def quality(text: str) -> float:
        return grammar(text).gqs_paper

    return {} if unless_missing(lambda: quality("word")) is None else {"gqs_paper": quality}


def unless_missing(load: Callable[[], T]) -> T | None:
    try:
        return load()
    except ValueError as error:  # a model that cannot be loaded, or a missing package
        screen.print(f"left out: {error}", highlight=False, soft_wrap=True)
        return None


def amount(quick: bool) -> tuple[int, int]:
    """How many texts, of how many words."""
    return (2, 10) if quick else (8, 200)


def keep_texts(run: Run, record: Record, samples: int, words: int) -> list[str]:
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
    measures = COUNTED | grammar_here()
    measures |= {} if quick else measures_here(judge, device_named("auto"))
    changed = [
        measured_again(row, records[row["case"]].read(FILE), measures, judge)
        for row in filter(lacks, rows)
    ]
    return put_rows(to, changed)


def measured_again(row: Row, kept: Row, measures: Mapping[str, Measure], judge: str | None) -> Row:
    """A row with {"metrics": means over texts by whose they are, ...}, new ones over old ones."""
    found = {who: means(kept[who], measures) for who in ("model", "people")}
    metrics = {who: row.get("metrics", {}).get(who, {}) | found[who] for who in found}
    is_judged = judge is not None and "perplexity" in found["model"]
    by = Path(str(judge)).name if is_judged else row.get("metrics_settings", {}).get("judge")
    settings = {"samples": len(kept["model"]), "words": kept["words"], "judge": by}
    return row | {"metrics": metrics, "metrics_settings": settings}


def means(texts: Sequence[str], measures: Mapping[str, Measure]) -> dict[str, float]:
    """Of each metric, over the texts that have it."""
    found = {}
    for name in METRICS:
        values = [measures[name](text) for text in texts] if name in measures else []
        if known := [value for value in values if value is not None]:
            found[name] = statistics.fmean(known)
    return found


def columns(rows: list[Row]) -> list[str]:
    """The metrics that all of these rows have."""
    return [
        name
        for name in METRICS
        if rows and all(name in row.get("metrics", {}).get("model", {}) for row in rows)
    ]


def metric_columns(rows: list[Row]) -> dict[str, Column]:
    """For tables: the models' means."""
    return {
        heading(name, rows): functools.partial(mean_of, who="model", name=name)
        for name in columns(rows)
    }


def people(rows: list[Row], number: int) -> list[list[str]]:
    """The last line of a table with so many columns: people's means, if there are any."""
    cells = [mean_of(rows, "people", name) for name in columns(rows)]
    return [["people", *[""] * (number - 1 - len(cells)), *cells]] if cells else []


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
