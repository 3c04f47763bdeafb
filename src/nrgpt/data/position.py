"""Sources of documents that can go on in the middle, and a journal of what was made of them.

A preparation that was killed does not read a stream from its beginning again: the journal says
which pieces are there, and where the stream stood after each.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..extras import need
from ..files import check_ours, open_ours, write_atomically
from .documents import Document, row_documents


class Source:
    """Documents that can be read again and again, from the beginning only."""

    def __init__(self, read: Callable[[], Iterable[Document]]):
        self.read = read

    def documents(self, after: Any = None, rows: int = 0) -> Iterable[Document]:
        """From the beginning, or after the ``rows`` that were read when ``state`` was this."""
        assert after is None
        return self.read()

    def state(self) -> Any:
        """Where the reading stands, for JSON; None: it cannot go on from there."""
        return None


class HubSource(Source):
    """The rows of a dataset from the Hugging Face Hub, while they are downloaded."""

    def __init__(self, name: str, split: str, field: str):
        self.name, self.split, self.field = name, split, field
        self.stream = self.opened()

    def opened(self) -> Any:
        datasets = need("datasets", "the Hugging Face Hub", "data")
        return datasets.load_dataset(self.name, split=self.split, streaming=True)

    @property
    def rows(self) -> int | None:
        """How many there are, if the Hub says so."""
        known = (self.stream.info.splits or {}).get(self.split)
        return known.num_examples if known else None

    def documents(self, after: Any = None, rows: int = 0) -> Iterator[Document]:
        self.stream = self.opened()  # one that has read already would go on from where it was
        if after is not None:
            self.stream.load_state_dict(after)
        numbered = enumerate(self.stream, rows)
        found = ((f"{self.name}: row {i}", row, i + 1) for i, row in numbered)
        return row_documents(found, self.field)

    def state(self) -> Any:
        return self.stream.state_dict() if hasattr(self.stream, "state_dict") else None


class Made(NamedTuple):
    """A piece that has been tokenised into a file."""

    file: str
    tokens: dict[str, int]
    documents: int
    read: int
    after: Any
    """The source's state after it."""


class Journal:
    """A line for each piece, in order. ``settings``: what decides about every piece."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self.path = path
        self.key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def begin(self, is_whole: Callable[[Path], bool]) -> list[Made]:
        """The pieces from which to go on: up to the first that is damaged, or not ours. What
        follows it in the journal is forgotten."""
        found = []
        content = check_ours(self.path).read_bytes() if self.path.exists() else b""
        for line in content.splitlines():
            try:
                key, *entry = json.loads(line)
                made = Made(*entry)
                is_ours = key == self.key and is_whole(self.path.parent / Path(made.file).name)
            except (ValueError, TypeError, RecursionError):
                break
            if not is_ours:
                break
            found.append(made)
        write_atomically(self.path, "".join(self.line(made) for made in found))
        return found

    def add(self, made: Made) -> None:
        if made.after is not None:
            with open_ours(self.path, "a") as file:
                file.write(self.line(made))

    def line(self, made: Made) -> str:
        return json.dumps([self.key, *made]) + "\n"
