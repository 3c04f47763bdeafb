"""Is everything in a run folder as it was written?"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..files import CHECKSUM, read_json, read_sealed, sealed, write_atomically
from . import checkpoint
from .data import TOKENIZER
from .metrics import FILE, Metrics
from .runs import check_is_run

SEALED = ("config.json", TOKENIZER, "result.json")


def verify_run(run: Path) -> Iterator[tuple[str, list[str]]]:
    """Each file or checkpoint, and what is wrong with it."""
    check_is_run(run)
    for name in SEALED:
        if (run / name).exists():
            yield name, faults_of(run / name)
    newest: dict[str, Any] = {}
    for path in checkpoint.checkpoints(run / "checkpoints"):
        fault = checkpoint.fault_of(path)
        if fault is None and not newest:
            newest = read_json(path / "state.json")
        yield f"checkpoints/{path.name}", [fault] if fault else []
    for path in checkpoint.aside(run / "checkpoints"):
        yield f"checkpoints/{path.name}", ["set aside by the training"]
    if (run / FILE).exists() or "metrics" in newest:
        yield FILE, Metrics(run).faults(newest.get("metrics"))


def faults_of(path: Path) -> list[str]:
    try:
        read_sealed(path)
    except ValueError as error:
        return [str(error)]
    if CHECKSUM not in read_json(path):
        return [f"{path} has no checksum: it is of an earlier version, or was changed"]
    return []


def accept_changes(run: Path) -> list[str]:
    """Take configuration, tokenizer and result as they are now; returns the names of those that had
    changed or had no checksum."""
    check_is_run(run)
    accepted = []
    for name in SEALED:
        path = run / name
        if path.exists() and faults_of(path):
            fields = read_json(path)
            write_atomically(path, sealed({k: v for k, v in fields.items() if k != CHECKSUM}))
            accepted.append(name)
    return accepted
