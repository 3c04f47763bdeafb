"""The records of an experiment in one file, FOLDER/records.jsonl: a line for each run.

    {"case": NAME, "files": {"config.json": {...}, "metrics.jsonl": [...], "samples.txt": "..."}}

A JSON file is stored as its value if writing that value gives the same bytes; other text is stored
as a string, and anything else as base64 under "binary". Unpacking gives back the same bytes. Lines
are sorted by name, so that packing the same files again changes nothing.

    python -m nrgpt.reproduce.records list FOLDER            the runs, and the files of each
    python -m nrgpt.reproduce.records unpack FOLDER          FOLDER/runs/NAME/...
    python -m nrgpt.reproduce.records pack FOLDER [RUN ...]  the reverse, by default of all of them
    python -m nrgpt.reproduce.records remove FOLDER NAME ...
"""

import base64
import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..files import check_plain, locked, make_folder, open_ours, unsealed, write_atomically

FILE = "records.jsonl"

FORMATS: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    ".json": (json.loads, lambda value: json.dumps(value, indent=1)),
    ".jsonl": (
        lambda text: [json.loads(line) for line in text.split("\n") if line],
        lambda value: "".join(json.dumps(entry) + "\n" for entry in value),
    ),
}
"""How to read and write the contents of a file, by its suffix."""


@dataclass(frozen=True)
class Record:
    """The small files of one run, by name."""

    files: dict[str, bytes]

    @classmethod
    def of(cls, run: Path, names: Iterable[str] | None = None) -> "Record":
        """All files of a folder, or those of the given names that exist."""
        wanted = [path.name for path in run.iterdir()] if names is None else names
        return cls({name: (run / name).read_bytes() for name in wanted if (run / name).exists()})

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> "Record":
        try:
            return cls(cls.files_of(line))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the record of {line['case']!r} cannot be read ({error!r}); remove its line, and "
                "its run will be recorded again"
            ) from error

    @staticmethod
    def files_of(line: Mapping[str, Any]) -> dict[str, bytes]:
        files = {
            name: base64.b64decode(text, validate=True)
            for name, text in line.get("binary", {}).items()
        }
        for name, value in line["files"].items():
            text = value if isinstance(value, str) else FORMATS[Path(name).suffix][1](value)
            files[name] = text.encode()
        return files

    def to_line(self, case: str) -> dict[str, Any]:
        line: dict[str, Any] = {"case": case, "files": {}}
        for name, content in sorted(self.files.items()):
            try:
                line["files"][name] = value_of(name, content.decode())
            except UnicodeDecodeError:
                line.setdefault("binary", {})[name] = base64.b64encode(content).decode()
        return line

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str) -> Any:
        """The contents of a .json or .jsonl file. Sealed JSON is checked."""
        value = FORMATS[Path(name).suffix][0](self.files[name].decode())
        return unsealed(value, name) if isinstance(value, dict) else value

    def write(self, folder: Path) -> None:
        for name in self.files:
            check_name(name)
        make_folder(folder)
        for name, content in self.files.items():
            with open_ours(folder / name, "wb") as file:
                file.write(content)


def check_name(name: str) -> str:
    """A run or a file of it, whose name a file of records gives: never a path to elsewhere."""
    if Path(name).name != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise ValueError(f"records: {name!r} is not a name for a file or a folder of runs")
    return name


def value_of(name: str, text: str) -> Any:
    """How a text file is stored in its line."""
    if Path(name).suffix in FORMATS:
        parse, write = FORMATS[Path(name).suffix]
        with contextlib.suppress(ValueError):
            value = parse(text)
            if not isinstance(value, str) and write(value) == text:
                return value
    return text


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of a file of results or records, by case. A file that is missing has none."""
    lines = check_plain(path).read_bytes().splitlines() if path.exists() else []
    found = [parse_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    return {line["case"]: line for line in found}


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("case"), str):
            return row
        problem = "it names no case"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise ValueError(
        f"{where}: no row of results ({problem}); delete this line, and its run will be recorded "
        "again"
    )


def read(folder: Path) -> dict[str, Record]:
    """All records of an experiment, by case."""
    return {case: Record.from_line(line) for case, line in read_lines(folder / FILE).items()}


def change(
    path: Path, new: Mapping[str, dict[str, Any] | None], *, in_order: bool = False
) -> list[dict[str, Any]]:
    """Add lines to a file of results or records, or replace those of the same cases; None removes
    one. Returns all lines. A lock is held meanwhile, so several processes may do this at the
    same time, and the file is replaced as a whole, so a crash leaves the old one or the new one."""
    lock = path.with_name(f".{path.name}.lock")
    with locked(lock, wait=True):
        merged = {**read_lines(path), **new}
        lines = {case: line for case, line in merged.items() if line is not None}
        found = [lines[case] for case in (sorted(lines) if in_order else lines)]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in found))
    return found


def put(folder: Path, records: Mapping[str, Record | None]) -> None:
    """Add these records, or replace those of the same cases; None removes one."""
    lines = {case: record.to_line(case) if record else None for case, record in records.items()}
    change(folder / FILE, lines, in_order=True)


# The command line --------------------------------------------------------------------------------

app = typer.Typer(help="Pack, unpack and list the records of an experiment.")


@app.command("list")
def list_records(folder: Path) -> None:
    for case, record in read(folder).items():
        sizes = (f"{name} {len(content):,}" for name, content in sorted(record.files.items()))
        print(f"{case}: {', '.join(sizes)}")


@app.command()
def pack(folder: Path, runs: Annotated[list[Path] | None, typer.Argument()] = None) -> None:
    """Add the files of these folders (default: FOLDER/runs/*) to the records, and delete them."""
    runs = runs or sorted(path for path in (folder / "runs").glob("*") if path.is_dir())
    for path in (path for run in runs for path in run.iterdir() if not path.is_file()):
        raise typer.BadParameter(f"{path} is not a file: a record can hold nothing else")
    packed = {run.name: Record.of(run) for run in runs}
    put(folder, packed)
    on_disk = read(folder)
    for run in runs:
        if on_disk[run.name] == packed[run.name]:
            shutil.rmtree(run)
        else:
            raise RuntimeError(f"{run} has been changed meanwhile, and is kept")
    print(f"{len(packed):,} of {len(on_disk):,} records in {folder / FILE} are new or replaced")


@app.command()
def unpack(folder: Path, to: Path | None = None) -> None:
    """Write the files of every record to TO/NAME (default: FOLDER/runs/NAME)."""
    for case, record in read(folder).items():
        record.write(make_folder(to or folder / "runs") / check_name(case))


@app.command()
def remove(folder: Path, cases: list[str]) -> None:
    """Remove these records. `nrgpt reproduce` will make them again."""
    if missing := [case for case in cases if case not in read(folder)]:
        raise typer.BadParameter(f"no record of {', '.join(missing)}")
    put(folder, dict.fromkeys(cases))


if __name__ == "__main__":
    app()
