"""RUN/metrics.jsonl: what a run has logged. Lines are only ever added, and nothing is rewritten.

    {"step": 20, "loss": 2.1, ...}
    {"back_to": 10}      the run went on from iteration 10: later ones above no longer count

Each checkpoint notes how long the file was, and its checksum: if it is shorter or has changed when
the run goes on, that is said.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import check_ours, check_plain, flush, open_ours

FILE = "metrics.jsonl"
Entries = list[dict[str, Any]]


class Metrics:
    """The file of a run that is being trained."""

    def __init__(self, run: Path):
        self.path = check_ours(run / FILE)
        content = content_of(self.path)
        self.written, self.hash = len(content), hashlib.sha256(content)
        self.is_cut = bool(content) and not content.endswith(b"\n")

    def add(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        if self.is_cut:  # a crash cut the last line short: it stays, on a line of its own
            line, self.is_cut = b"\n" + line, False
        with open_ours(self.path, "ab") as file:
            file.write(line)
        self.written += len(line)
        self.hash.update(line)

    def go_back(self, step: int) -> None:
        """The run goes on from this iteration: what was logged after it will come again."""
        if any(entry["step"] > step for entry in read(self.path)[0]):
            self.add({"back_to": step})

    def keep(self) -> dict[str, Any]:
        """Force the file to the disk; returns what a checkpoint notes of it."""
        if self.path.exists():
            flush(self.path)
        return {"bytes": self.written, "sha256": self.hash.hexdigest()}

    def faults(self, kept: Mapping[str, Any] | None) -> list[str]:
        """What is wrong with the file, given what a checkpoint noted of it."""
        found = read(self.path)[1]
        content = content_of(self.path)
        if kept is None:  # a checkpoint from before this was noted
            return found
        if not isinstance(kept.get("bytes"), int):
            return [*found, f"{self.path}: the checkpoint does not say how long this was"]
        if len(content) < kept["bytes"]:
            number = f"{len(content):,} bytes where {kept['bytes']:,} were written"
            return [*found, f"{self.path}: {number}: lines are missing from this history"]
        if hashlib.sha256(content[: kept["bytes"]]).hexdigest() != kept["sha256"]:
            return [*found, f"{self.path}: lines have changed since they were written"]
        return found


def read(path: Path) -> tuple[Entries, list[str]]:
    """The entries that count, and what is wrong with the other lines."""
    entries: Entries = []
    faults = []
    for number, line in enumerate(content_of(path).split(b"\n"), 1):
        if not line:
            continue
        try:
            entry = json.loads(line)
            if not is_entry(entry):
                raise ValueError("not an entry")
        except (ValueError, RecursionError) as error:
            faults.append(f"{path}: line {number} cannot be read and is passed over ({error})")
            continue
        if "step" in entry:
            entries.append(entry)
        else:
            entries = [kept for kept in entries if kept["step"] <= entry["back_to"]]
    return entries, faults


def content_of(path: Path) -> bytes:
    return check_plain(path).read_bytes() if path.exists() else b""


def is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("step", entry.get("back_to"))) is int


def read_metrics(run: Path) -> Entries:
    return read(run / FILE)[0]
