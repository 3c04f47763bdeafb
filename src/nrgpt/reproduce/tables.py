"""From rows of results to tables."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write_atomically

Row = dict[str, Any]
Column = Callable[[list[Row]], Any]
"""The cell of a table's line, from the rows of the runs that the line is about."""


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of these fields, in order of appearance, without runs that failed."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "error" not in row:
            groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return groups


def means(rows: Iterable[Row], x: str, y: str) -> tuple[list[float], list[float]]:
    """The values of x, and the mean of y at each of them, for lines in figures."""
    points = sorted((key, [row[y] for row in own]) for (key,), own in grouped(rows, x).items())
    return [point[0] for point in points], [statistics.fmean(point[1]) for point in points]


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean and standard deviation."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def of_first(text: str) -> Column:
    """``text`` filled in from the first run, for what all runs of a line share."""
    return lambda own: text.format(**own[0])


def spread_of(name: str, digits: int = 4) -> Column:
    return lambda own: spread([row[name] for row in own], digits)


LOSSES: dict[str, Column] = {
    "seeds": len,
    "training, estimate": spread_of("train_loss"),
    "validation, estimate": spread_of("val_loss"),
    "validation, whole split": spread_of("val_loss_full"),
}


def table(columns: Mapping[str, Column], groups: Iterable[list[Row]], *last: Sequence[Any]) -> str:
    """A line for each group of rows, and then the lines ``last``."""
    lines = [[column(own) for column in columns.values()] for own in groups]
    return markdown(list(columns), [*lines, *last])


def markdown(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [list(headings), ["---"] * len(headings), *([str(cell) for cell in r] for r in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return path


def failures(rows: Iterable[Row]) -> str:
    """A sentence below a table that names the runs left out of it."""
    names = [row["case"] for row in rows if "error" in row]
    return f"\nDiverged, and in no mean: {', '.join(names)}.\n" if names else ""
