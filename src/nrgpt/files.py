"""Files of ours: whole or not there, never somebody else's behind a link, and locks.

What decides a model's output beside its weights (a configuration, a tokenizer, a result) is kept as
sealed JSON: with a checksum of itself, so that it is replaced in one piece and checked alone.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, SoftFileLock, Timeout

CHECKSUM = "checksum"
"""The field of sealed JSON that holds the sha256 of all others."""


class NotOurs(ValueError):
    """A link, a folder or a device stands where a plain file or folder of ours belongs."""


class Changed(ValueError):
    """Sealed JSON that does not fit its checksum."""


def fingerprint(path: Path) -> dict[str, Any]:
    check_plain(path)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": sha256}


def flush(path: Path) -> None:
    """Force a file or folder from the operating system's cache to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open a folder, and keeps it by itself
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# What belongs to us ------------------------------------------------------------------------------


def check_ours(path: Path) -> Path:
    """Refuse to write where a link or anything else than a plain file stands. A run or dataset from
    somebody else could point it at any file of ours."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            kind = "a link" if path.is_symlink() else "no plain file"
            raise NotOurs(f"{path} is {kind}, and will not be written to; remove it first")
    return path


def check_plain(path: Path) -> Path:
    """Refuse to read what is no plain file, nor a link to one: a pipe in its place would be waited
    for without end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise NotOurs(f"{path} is no plain file, and will not be read; remove it")
    return path


def make_folder(folder: Path) -> Path:
    """Create a folder of ours if it is missing; a link in its place is refused."""
    if folder.is_symlink():
        raise NotOurs(f"{folder} is a link, and will not be written into; remove it first")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def missing_folders(folder: Path) -> list[Path]:
    """The folders that ``mkdir`` would create, outermost first."""
    wanted = [folder, *folder.parents]
    return [path for path in reversed(wanted) if not path.exists()]


def refuse_links(folder: Path) -> None:
    """Refuse a folder into which files are to be written by name, if one of them is a link."""
    make_folder(folder)
    for path in folder.iterdir():
        if path.is_symlink():
            raise NotOurs(f"{path} is a link, and will not be written to; remove it first")


def open_ours(path: Path, mode: str) -> IO[Any]:
    """``open`` for writing, but never through a link, not even one that appears just now."""
    check_ours(path)

    def opener(name: str, flags: int) -> int:
        # Nonblocking: a pipe in its place would wait for a reader.
        extra = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        return os.open(name, flags | extra, 0o666)

    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)


def check_writable(folder: Path) -> None:
    """Raise the system's error now if nothing can be written here, and not after the work."""
    probe = make_folder(folder) / f".probe.{os.getpid()}"
    with open_ours(probe, "xb"):
        pass
    probe.unlink()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a small file completely, or leave it as it was."""
    check_ours(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.unlink(missing_ok=True)  # of a process that was killed and had this number
        with open_ours(unfinished, "xb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        flush(unfinished)
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def unfinished_of_dead(folder: Path, name: str = "*") -> list[Path]:
    """What processes that no longer live were writing in a folder when they were killed."""
    left = []
    for path in folder.glob(f".{name}.*"):
        number = re.fullmatch(r"\..+\.([0-9]+)", path.name)
        if number and not path.is_symlink() and not is_alive(int(number[1])):
            left.append(path)
    return left


def is_alive(process: int) -> bool:
    if os.name == "nt" or process > 2**31 - 1:  # os.kill would end it
        return process == os.getpid()
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


# Locks -------------------------------------------------------------------------------------------


class InUse(OSError):
    """Another process holds a lock."""

    def __init__(self, path: Path, holder: str):
        super().__init__(f"{path} is held by process {holder}")
        self.holder = holder


@contextmanager
def locked(path: Path, *, wait: bool = False, keep: bool = False) -> Iterator[None]:
    """Hold a lock file. The system frees it when this process ends, in whatever way. Without
    ``wait``, InUse is raised at once if another process holds it. Afterwards the file is gone,
    unless it is to be kept. (filelock finds out if what it waited for has been removed.)"""
    lock = FileLock(check_ours(path), timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise InUse(path, holder_of(path)) from None
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    try:
        # Windows lets nobody look into a locked file, and a soft lock has its own contents.
        if os.name != "nt" and not isinstance(lock, SoftFileLock):
            with open_ours(path, "w") as file:
                file.write(str(os.getpid()))
        yield
    finally:
        if not keep:
            with suppress(OSError):  # Windows does not remove a file in use
                path.unlink()
        lock.release()


def holder_of(path: Path) -> str:
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        words = []
    return words[0] if words else "unknown"


# JSON --------------------------------------------------------------------------------------------


def read_json(path: Path) -> Any:
    """The value in a JSON file. Whatever is wrong with it is a ValueError that names the file."""
    check_plain(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); restore it or remove it") from error


def sealed(fields: Mapping[str, Any]) -> str:
    """JSON with a checksum of all fields."""
    fields = json.loads(json.dumps(fields))  # as they will be read back: tuples become lists
    return json.dumps({**fields, CHECKSUM: checksum(fields)}, indent=1)


def checksum(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def unsealed(value: Any, where: Path | str) -> dict[str, Any]:
    """The fields of sealed JSON, checked. Files from before there were checksums have none."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds {type(value).__name__}, not fields; restore the file")
    fields = {name: value[name] for name in value if name != CHECKSUM}
    if CHECKSUM in value and value[CHECKSUM] != checksum(fields):
        raise Changed(
            f"{where} has changed since it was written: its checksum does not fit. Restore it or, "
            "if it was changed on purpose, accept it: nrgpt verify RUN --accept-changes"
        )
    return fields


def read_sealed(path: Path) -> dict[str, Any]:
    return unsealed(read_json(path), path)
