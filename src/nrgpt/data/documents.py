"""Documents of text files: .txt, .txt.xz, .jsonl and .parquet, one after the other."""

import importlib
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .shards import DataError

PIECE_CHARACTERS = 2 << 20  # one piece of work; also the size in which endless documents are read


class Document(NamedTuple):
    text: str
    place: str  # file and line or byte, for errors
    read: int  # how much of the sources was read so far, for the progress bar
    ends: bool = True  # False: the document goes on in the next one


def documents_of_all(
    sources: Sequence[Path], readers: Sequence[Iterator[Document]]
) -> Iterator[Document]:
    read = 0
    for path, documents in zip(sources, readers, strict=True):
        is_empty = True
        for document in documents:
            is_empty = False
            yield document._replace(read=read + document.read)
        if is_empty:
            raise DataError(f"{path}: there is no document in this file")
        read += path.stat().st_size


def open_source(path: Path, separator: str, field: str) -> Iterator[Document]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    if path.name.endswith((".txt", ".txt.xz")):
        return text_documents(path, separator)
    if path.suffix == ".jsonl":
        return row_documents(jsonl_rows(path), field)
    if path.suffix == ".parquet":
        return row_documents(parquet_rows(path, field), field)
    raise ValueError(f"{path}: must be a file .txt, .txt.xz, .jsonl or .parquet")


def lines_of(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """(offset in the unpacked text, line, bytes of the file read so far)."""
    offset = 0
    is_packed = path.suffix == ".xz"
    with path.open("rb") as packed, lzma.open(packed) if is_packed else packed as unpacked:
        try:
            for line in unpacked:
                yield offset, line, packed.tell()
                offset += len(line)
        except (lzma.LZMAError, EOFError) as error:
            raise DataError(f"{path}: byte {offset} of the unpacked text: {error}") from error


def text_documents(path: Path, separator: str) -> Iterator[Document]:
    lines, size, start, is_continued = list[bytes](), 0, 0, False

    def text() -> str:
        try:
            return b"".join(lines).decode()
        except UnicodeDecodeError as error:
            problem = f"this is not UTF-8 ({error.reason})"
            raise DataError(f"{path}: byte {start + error.start}: {problem}") from error

    for offset, line, read in lines_of(path):
        place = f"{path}: byte {start}"
        if line.rstrip(b"\r\n") == separator.encode():
            document = text().removesuffix("\n").removesuffix("\r")
            if is_continued or is_text(document):
                yield Document(document, place, read)
            lines, size, start, is_continued = [], 0, offset + len(line), False
            continue
        lines.append(line)
        size += len(line)
        if size >= PIECE_CHARACTERS and not line.isspace():
            # GPT-2 joins nothing across the beginning of white space: cut there, no token differs.
            part = text().rstrip()
            yield Document(part, place, read, ends=False)
            white_space = b"".join(lines)[len(part.encode()) :]
            lines, size, is_continued = [white_space], len(white_space), True
            start = offset + len(line) - size
    if is_continued or is_text(text()):
        yield Document(text(), f"{path}: byte {start}", path.stat().st_size)


def is_text(document: str) -> bool:
    return document != "" and not document.isspace()


def row_documents(rows: Iterable[tuple[str, Any, int]], field: str) -> Iterator[Document]:
    """Documents of (place, row, read so far)."""
    for place, row, read in rows:
        if not isinstance(row, Mapping) or not isinstance(row.get(field), str):
            found = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
            raise DataError(f"{place}: there is no text in the field {field!r} (found: {found})")
        if is_text(row[field]):
            yield Document(row[field], place, read)


def jsonl_rows(path: Path) -> Iterator[tuple[str, Any, int]]:
    for number, (offset, line, read) in enumerate(lines_of(path), 1):
        place = f"{path}: line {number}"
        if line.isspace():
            continue
        try:
            yield place, json.loads(line), read
        except ValueError as error:
            raise DataError(f"{place} (from byte {offset}): not JSON: {error}") from error


def parquet_rows(path: Path, field: str) -> Iterator[tuple[str, Any, int]]:
    parquet, size, number = optional_module("pyarrow.parquet"), path.stat().st_size, 0
    try:
        with parquet.ParquetFile(path) as file:
            # Without the field, all columns are read: the error names what there is instead.
            columns = [field] if field in file.schema_arrow.names else None
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    yield f"{path}: row {number}", row, size * number // file.metadata.num_rows
                    number += 1
    except (OSError, optional_module("pyarrow").ArrowException) as error:
        raise DataError(f"{path}: row {number}: {error}") from error


def optional_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"this needs {name}: pip install 'nrgpt[data]'") from error
