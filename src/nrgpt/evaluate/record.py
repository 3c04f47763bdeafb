"""RUN/evaluation.json: all results, with one entry per set of settings.

    {"entries": [{"settings": {"split": "val", "steps": 8, ...}, "loss": {...}, ...}, ...]}

Measuring again with the same settings replaces the earlier result.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import read_json, write_atomically

FILE = "evaluation.json"


def read_record(run: Path) -> list[dict[str, Any]]:
    """All entries, oldest first."""
    path = run / FILE
    if not path.exists():
        return []
    try:
        entries = read_json(path)["entries"]
        if not all("settings" in entry for entry in entries):
            raise ValueError("an entry has no settings")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error!r}); move it away to start a new one"
        ) from error
    return list(entries)


def write_record(run: Path, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Add results to the entry of these settings, replacing results of the same name."""
    settings = json.loads(json.dumps(settings))  # as it will be read back: tuples become lists
    entries = read_record(run)
    entry = next((e for e in entries if e["settings"] == settings), None)
    if entry is None:
        entry = {"settings": settings}
        entries.append(entry)
    entry.update(results)
    write_atomically(run / FILE, json.dumps({"entries": entries}, indent=1) + "\n")
