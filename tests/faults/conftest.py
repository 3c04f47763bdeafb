"""Counts of faults, and the table of them at the end.

The short form runs with all tests; `make faults` runs the long one.
"""

import contextlib
import os

import pytest

from nrgpt.train import loop
from tests.runs import debug

IS_LONG = os.environ.get("NRGPT_FAULTS") == "long"
counted: dict[str, list[int]] = {}


class Faults:
    """The faults of one kind. Each is tried in a block of its own; those that do harm are
    collected, so that one does not hide the others."""

    def __init__(self, kind):
        self.kind, self.tried, self.harm = kind, 0, []

    @contextlib.contextmanager
    def fault(self, what):
        self.tried += 1
        try:
            yield
        except Exception as error:
            self.harm.append(f"{what}: {error!r}"[:500])


@pytest.fixture
def faults(record_property):
    @contextlib.contextmanager
    def of_kind(kind):
        found = Faults(kind)
        yield found
        record_property("faults", (kind, found.tried, found.tried - len(found.harm)))
        assert found.tried, "nothing was tried"
        assert not found.harm, "\n".join(found.harm[:20])

    return of_kind


@pytest.fixture
def many():
    """The number of faults to try: many(short, long)."""
    return lambda short, long: long if IS_LONG else short


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A small finished run, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("trained")
    before = os.environ.get("NRGPT_DATA")
    os.environ["NRGPT_DATA"] = str(folder / "data")
    cfg = debug("iterations=8", "save_every=4", "eval_every=4", "log_every=1", "optimiser.warmup=1")
    loop.train(cfg, folder / "run")
    if before is not None:
        os.environ["NRGPT_DATA"] = before
    return folder


def pytest_runtest_logreport(report):
    for name, value in report.user_properties:
        if name == "faults" and report.when == "call":
            kind, tried, held = value
            total = counted.setdefault(kind, [0, 0])
            total[0] += tried
            total[1] += held


def pytest_terminal_summary(terminalreporter):
    if not counted:
        return
    terminalreporter.section("faults")
    wide = max(map(len, counted))
    for kind, (tried, held) in sorted(counted.items()):
        terminalreporter.write_line(f"{kind:<{wide}}  {held:>7,} of {tried:>7,} held")
    tried, held = (sum(each) for each in zip(*counted.values(), strict=True))
    terminalreporter.write_line(f"{'all':<{wide}}  {held:>7,} of {tried:>7,} held")
