"""Documents from text files: .txt, .txt.xz, .jsonl and .parquet, one after the other."""

import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..extras import need
from .shards import DataError

PIECE_CHARACTERS = 2 << 20  # work for one process; longer documents are read in such parts


class Document(NamedTuple):
    text: str
    place: str  # file and line or byte, for errors
    read: int  # how much of the sources has been read, for the progress bar
    ends: bool = True  # False: the document continues in the next one


class Piece(NamedTuple):
    """Documents to tokenise together."""

    number: int
    first_document: int
    documents: list[Document]
    after: Any = None  # where the source stands after them


def gather(
    documents: Iterable[Document],
    state: Callable[[], Any] = lambda: None,
    number: int = 0,
    first_document: int = 0,
) -> Iterator[Piece]:
    """``state`` says where the source of the documents stands; ``number`` and ``first_document``
    are where they begin."""
    gathered, characters = list[Document](), 0
    for document in documents:
        gathered.append(document)
        characters += len(document.text)
        if characters >= PIECE_CHARACTERS:
            yield Piece(number, first_document, gathered, state())
            number, first_document = number + 1, first_document + sum(d.ends for d in gathered)
            gathered, characters = [], 0
    if gathered:
        yield Piece(number, first_document, gathered, state())


def documents_of_all(sources: Iterable[tuple[Path, Iterator[Document]]]) -> Iterator[Document]:
    before = 0
    for path, documents in sources:
        document = None
        for document in documents:
            yield document._replace(read=before + document.read)
        if document is None:
            raise DataError(f"{path}: there is no document in this file")
        before += path.stat().st_size


def open_source(path: Path, separator: str, field: str) -> Iterator[Document]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    if path.name.endswith((".txt", ".txt.xz")):
        return text_documents(path, separator)
    if path.suffix == ".jsonl":
        return row_documents(jsonl_rows(path), field)
    if path.suffix == ".parquet":
        return row_documents(parquet_rows(path, field), field)
    raise ValueError(f"{path}: must be a .txt, .txt.xz, .jsonl or .parquet file")


def lines_of(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """(offset in the unpacked text, line, bytes read of the file)."""
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
            # No token of GPT-2 spans the beginning of white space: a cut there changes none.
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
    """Documents from rows, given as (place, row, read so far)."""
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
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} (from byte {offset}): not JSON: {error}") from error


def parquet_rows(path: Path, field: str) -> Iterator[tuple[str, Any, int]]:
    parquet = need("pyarrow.parquet", "reading .parquet files", "data")
    size, number = path.stat().st_size, 0
    try:
        with parquet.ParquetFile(path) as file:
            # Without the field, read all columns: the error will name them.
            columns = [field] if field in file.schema_arrow.names else None
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    yield f"{path}: row {number}", row, size * number // file.metadata.num_rows
                    number += 1
    except (OSError, need("pyarrow", "reading .parquet files", "data").ArrowException) as error:
        raise DataError(f"{path}: row {number}: {error}") from error
