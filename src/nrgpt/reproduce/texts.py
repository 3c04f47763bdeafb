"""Texts of finished runs, and those of their metrics that this machine can compute."""

import functools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

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

METRICS = ("perplexity", "gqs_paper", "cosine_similarity", "distinct_1", "distinct_2")
"""The paper's five, in the order of its tables."""
COUNTED: dict[str, Measure] = {f"distinct_{n}": functools.partial(distinct_n, n=n) for n in (1, 2)}


def available(loaders: Mapping[str, Callable[[], Measure]]) -> dict[str, Measure]:
    """The metrics that can be loaded here. The others are left out, with a message."""
    found = {}
    for name, load in loaders.items():
        try:
            found[name] = load()
        except ValueError as error:  # a model that cannot be loaded, or a missing package
            screen.print(f"left out: {error}", highlight=False, soft_wrap=True)
    return found


@functools.cache
def measures_here(judge: str | None, device: str) -> dict[str, Measure]:
    """The metrics that need other models."""
    loaders = measures_to_load(judge).items()
    return available({name: functools.partial(load, device) for name, load in loaders})


def load_grammar() -> Measure:
    grammar("word")  # fails if a package is missing
    return lambda text: grammar(text).gqs_paper


def amount(quick: bool) -> tuple[int, int]:
    """The number of texts, and of words in each."""
    return (2, 10) if quick else (8, 200)


def keep_texts(run: Run, record: Record, samples: int, words: int) -> list[str]:
    """Put texts by the model and by people, all of one length, into the run's record, so that they
    can be measured on any machine. Returns the model's."""
    tokens = run.dataset(verify=False).tokens("val")
    written = model_texts(run, number=samples, words=words)
    read = human_texts(tokens, run.tokenizer, number=samples, words=words)
    kept = {"words": words, "model": written, "people": read}
    record.files[FILE] = json.dumps(kept, indent=1).encode()
    return written


def with_metrics(rows: list[Row], to: Path, judge: str | None, quick: bool = False) -> list[Row]:
    """Add the metrics that can be computed here to the rows, also on disk. Rows that have them all,
    by this judge, stay as they are, and no row loses a metric."""

    def lacks(row: Row) -> bool:
        by = row.get("metrics_settings", {}).get("judge")
        is_whole = all(name in metrics_of(row, "model") for name in METRICS)
        has_texts = FILE in records.get(row["case"], ())
        return has_texts and not (is_whole and (judge is None or by == Path(judge).name))

    records = read(to)
    if not any(map(lacks, rows)):
        return rows
    measures = COUNTED | available({"gqs_paper": load_grammar})
    measures |= {} if quick else measures_here(judge, device_named("auto"))
    changed = [
        measured_again(row, records[row["case"]].read(FILE), measures, judge)
        for row in filter(lacks, rows)
    ]
    return put_rows(to, changed)


def measured_again(row: Row, kept: Row, measures: Mapping[str, Measure], judge: str | None) -> Row:
    """The row with the mean of each metric over the model's texts and over people's. New values
    replace old ones."""
    found = {who: means(kept[who], measures) for who in ("model", "people")}
    metrics = {who: metrics_of(row, who) | found[who] for who in found}
    is_judged = judge is not None and "perplexity" in found["model"]
    by = Path(str(judge)).name if is_judged else row.get("metrics_settings", {}).get("judge")
    settings = {"samples": len(kept["model"]), "words": kept["words"], "judge": by}
    return row | {"metrics": metrics, "metrics_settings": settings}


def means(texts: Sequence[str], measures: Mapping[str, Measure]) -> dict[str, float]:
    """The mean of each metric, over the texts that have it."""
    found = {}
    for name in filter(measures.__contains__, METRICS):
        values = [value for text in texts if (value := measures[name](text)) is not None]
        if values:
            found[name] = statistics.fmean(values)
    return found


def metrics_of(row: Row, who: str) -> dict[str, float]:
    return row.get("metrics", {}).get(who, {})


def columns(rows: list[Row]) -> list[str]:
    """The metrics that all of these rows have."""
    return [m for m in METRICS if rows and all(m in metrics_of(row, "model") for row in rows)]


def metric_columns(rows: list[Row]) -> dict[str, Column]:
    """For tables: the means over the models' texts."""
    return {
        heading(name, rows): functools.partial(mean_of, who="model", name=name)
        for name in columns(rows)
    }


def people(rows: list[Row], number: int) -> list[list[str]]:
    """The last line of a table with ``number`` columns: the means over people's texts, if any."""
    cells = [mean_of(rows, "people", name) for name in columns(rows)]
    return [["people", *[""] * (number - 1 - len(cells)), *cells]] if cells else []


def heading(name: str, rows: list[Row]) -> str:
    return TITLES[name].format(judge=rows[0]["metrics_settings"]["judge"])


def mean_of(rows: list[Row], who: str, name: str) -> str:
    values = [metrics_of(row, who)[name] for row in rows if name in metrics_of(row, who)]
    if not values:
        return "-"
    mean = sum(values) / len(values)
    return f"{mean:.0f}" if name == "perplexity" else f"{mean:.3f}"
