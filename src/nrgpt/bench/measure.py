"""Time several things in one run: warmed up, in turns, with medians and their spread."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table

from ..train.report import environment
from ..train.speed import matrix_product_rate

SECONDS = 2.0
"""How long each is timed."""


@dataclass(frozen=True)
class Work:
    """Something to time: a call handles ``tokens`` tokens, with ``flops`` each if counted."""

    call: Callable[[], Any]
    tokens: int
    flops: float | None = None
    note: str = ""
    parts: int = 1
    """A call does its work this many times in a row; the table has the time of one."""


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float
    low: float
    high: float
    tokens_per_second: float
    share: float | None
    """Share of the rate of a large matrix product, measured in the same run."""
    note: str = ""


@dataclass
class Report:
    suite: str
    title: str
    rows: list[Row]
    product_rate: float
    machine: dict[str, Any] = field(default_factory=environment)

    def table(self) -> Table:
        rate = f"{self.product_rate / 1e12:.3g} TFLOP/s"
        table = Table(title=self.title, caption=f"share: of a large matrix product, {rate}")
        table.add_column("what")  # on a narrow screen, words wrap and numbers do not
        for heading in ("ms", "spread", "tokens/s", "share", "speed"):
            table.add_column(heading, justify="right", no_wrap=True)
        if any(row.note for row in self.rows):
            table.add_column("note")
        first = self.rows[0].tokens_per_second
        for row in self.rows:
            table.add_row(
                row.name,
                digits(row.seconds),
                f"{digits(row.low)} - {digits(row.high)}",
                f"{row.tokens_per_second:,.0f}",
                "" if row.share is None else f"{100 * row.share:.0f} %",
                f"{row.tokens_per_second / first:.2f} x",
                *([row.note] if len(table.columns) > 6 else []),
            )
        return table


def digits(seconds: float) -> str:
    """Milliseconds with three digits, never in powers of ten."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def compare(suite: str, title: str, works: Mapping[str, Work], device: torch.device) -> Report:
    """Time all in turns, so that a change of the machine's speed affects them alike, each for about
    SECONDS. The table gives speeds per token, relative to the first."""
    for work in works.values():
        for _ in range(3):
            work.call()
    rate = matrix_product_rate(device, "bf16" if device.type == "cuda" else "fp32")
    times: dict[str, list[float]] = {name: [] for name in works}
    while any(sum(spent) < SECONDS or len(spent) < 5 for spent in times.values()):
        for name, work in works.items():
            if sum(times[name]) < SECONDS or len(times[name]) < 5:
                times[name].append(timed(work.call, device))
    rows = []
    for name, work in works.items():
        low, median, high = (of(times[name]) / work.parts for of in (min, statistics.median, max))
        per_second = work.tokens / work.parts / median
        share = None if work.flops is None else per_second * work.flops / rate
        rows.append(Row(name, median, low, high, per_second, share, work.note))
    return Report(suite, title, rows, rate)


def timed(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
