"""Files that are whole or not there: flushed to the disk, fingerprinted, replaced at once."""

import hashlib
import os
from pathlib import Path
from typing import Any


def fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def flush(path: Path) -> None:
    """Have the disk hold it, not only the operating system."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file by a whole new one, or leave it as it was."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        flush(unfinished)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
