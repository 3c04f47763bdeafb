"""Is everything in a run folder, or in an export, as it was written?"""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files import CHECKSUM, read_json, read_sealed, sealed, write_atomically
from ..interop.checksums import FILE as FILE_OF_EXPORT
from ..interop.checksums import faults_of as faults_of_export
from ..interop.checksums import write_checksums
from ..interop.exported import is_export
from . import checkpoint
from .data import TOKENIZER
from .metrics import FILE, Metrics
from .runs import check_is_run

SEALED = ("config.json", TOKENIZER, "result.json")


def verify_run(run: Path) -> Iterator[tuple[str, list[str]]]:
    """Each file or checkpoint of a run, or each file of an export, and what is wrong with it. A
    training that goes on meanwhile may remove a checkpoint."""
    if is_export(run):
        yield from ((name, [said] if said else []) for name, said in faults_of_export(run).items())
        return
    check_is_run(run)
    for name in SEALED:
        if (run / name).exists():
            yield name, faults_of(run / name)
    newest: dict[str, Any] = {}
    for path in checkpoint.checkpoints(run / "checkpoints"):
        fault = checkpoint.fault_of(path)
        if fault is not None and is_being_removed(path):
            continue
        if fault is None and not newest:
            with suppress(FileNotFoundError):  # removed just now
                newest = checkpoint.read_state(path)
        yield f"checkpoints/{path.name}", [fault] if fault else []
    for path in checkpoint.aside(run / "checkpoints"):
        yield f"checkpoints/{path.name}", ["set aside by the training"]
    if (run / FILE).exists() or "metrics" in newest:
        yield FILE, Metrics(run).faults(newest.get("metrics"))


def is_being_removed(checkpoint: Path, seconds: float = 1) -> bool:
    """By the training, which takes a moment."""
    end = time.monotonic() + seconds
    while checkpoint.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def faults_of(path: Path) -> list[str]:
    try:
        read_sealed(path)
    except ValueError as error:
        return [str(error)]
    if CHECKSUM not in read_json(path):
        return [f"{path} has no checksum: it is of an earlier version, or was changed"]
    return []


def accept_changes(run: Path) -> list[str]:
    """Take configuration, tokenizer and result of a run as they are now, or all files of an export;
    returns the names of those that had changed or had no checksum."""
    if is_export(run):
        changed = [name for name, said in faults_of_export(run).items() if said]
        if changed or not (run / FILE_OF_EXPORT).is_file():
            write_checksums(run)
        return changed
    check_is_run(run)
    accepted = []
    for name in SEALED:
        path = run / name
        if path.exists() and faults_of(path):
            fields = read_json(path)
            if not isinstance(fields, dict):
                raise ValueError(
                    f"{path} holds no fields, so nothing could be accepted; restore it"
                )
            write_atomically(path, sealed({k: v for k, v in fields.items() if k != CHECKSUM}))
            accepted.append(name)
    return accepted
