"""Tokenise any text into shards: local files, or a dataset from the Hugging Face Hub.

Documents are read in order and gathered into pieces. Workers tokenise each piece into a file in
FOLDER.partial, and these files become the shards at the end. The name of such a file has a hash of
everything that determines its content, so that a run that was killed can use what it had finished.
"""

import collections
import dataclasses
import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, TextColumn

from ..check import check
from ..extras import need
from .documents import (
    Document,
    Piece,
    documents_of_all,
    gather,
    open_source,
    row_documents,
)
from .shards import DataError, refuse_existing, token_dtype, working_folder, write_dataset
from .tokenizer import Tokenizer

OPENWEBTEXT = "Skylion007/openwebtext"


def prepare_text(
    sources: Sequence[Path],
    folder: Path,
    *,
    separator: str = "<|endoftext|>",
    field: str = "text",
    **options: Any,
) -> None:
    """Tokenise local files (.txt, .txt.xz, .jsonl, .parquet) into the dataset ``folder``.

    In text files, a line that is exactly ``separator`` ends a document. In .jsonl and .parquet
    files, each line or row is a document, with its text in ``field``. ``options`` go to
    prepare_documents.
    """
    check(len(sources) > 0, "sources", sources, "at least one file")
    readers = [open_source(path, separator, field) for path in sources]
    files = [{"name": path.name, "bytes": path.stat().st_size} for path in sources]
    total = sum(path.stat().st_size for path in sources)
    documents = documents_of_all(zip(sources, readers, strict=True))
    prepare_documents(documents, folder, {"kind": "text", "files": files}, total, **options)


def prepare_hub(
    name: str, folder: Path, *, split: str = "train", field: str = "text", **options: Any
) -> None:
    """Tokenise a dataset from the Hugging Face Hub, such as OPENWEBTEXT, while it downloads.
    ``options`` go to prepare_documents."""
    stream = need("datasets", "the Hugging Face Hub", "data").load_dataset(
        name, split=split, streaming=True
    )
    rows = ((f"{name}: row {i}", row, i + 1) for i, row in enumerate(stream))
    known = (stream.info.splits or {}).get(split)
    total = known.num_examples if known else None
    source = {"kind": "hub", "name": name, "split": split}
    prepare_documents(row_documents(rows, field), folder, source, total, **options)


def prepare_documents(
    documents: Iterable[Document],
    folder: Path,
    source: Mapping[str, Any],
    total: int | None,
    *,
    tokenizer: Tokenizer,
    validation: float = 0.0005,
    seed: int = 0,
    workers: int = 1,
    shard_tokens: int = 100_000_000,
    progress: bool = True,
) -> None:
    """Tokenise documents into a dataset. After an interruption, the same call continues.

    A hash of the seed and a document's number decides whether it is in the split "val", with
    probability ``validation``. The result does not depend on the number of workers.
    """
    check(0 <= validation < 1, "validation", validation, "in [0, 1)")
    check(workers >= 1, "workers", workers, "at least 1")
    check(shard_tokens >= 1, "shard_tokens", shard_tokens, "at least 1")
    folder = folder.absolute()
    refuse_existing(folder)
    tokenizer.encode("")  # if something is missing, fail here and not in every worker
    partial = folder.with_name(folder.name + ".partial")
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[tokens]:,} tokens"))
    with working_folder(partial):
        maker = PieceMaker(partial, tokenizer, seed, validation)
        tokens, number = collections.Counter[str](), 0
        paths = []
        with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
            task = bar.add_task(f"tokenising {folder.name}", total=total, tokens=0)
            for piece, (path, counts) in in_parallel(maker, gather(documents), workers):
                paths.append(path)
                tokens.update(counts)
                number += sum(document.ends for document in piece.documents)
                bar.update(task, completed=piece.documents[-1].read, tokens=tokens.total())
        splits = ["train", "val"] if validation > 0 else ["train"]
        for split in splits:
            wanted = f"such that some of the {number} documents are in split {split!r}"
            check(tokens[split] > 0, "validation", validation, wanted)
        pieces = {split: maker.read_all(paths, split) for split in splits}
        facts = {**source, "documents": number, "validation": validation, "seed": seed}
        write_dataset(folder, tokenizer, pieces, source=facts, shard_tokens=shard_tokens)
        shutil.rmtree(partial)


@dataclasses.dataclass(frozen=True)
class PieceMaker:
    """Tokenises a piece into a file, unless an earlier run has done so."""

    folder: Path
    tokenizer: Tokenizer
    seed: int
    validation: float

    def __call__(self, piece: Piece) -> tuple[Path, dict[str, int]]:
        settings = (self.tokenizer.fingerprint(), self.seed, self.validation)
        content = hashlib.sha256(repr((settings, piece.first_document)).encode())
        for document in piece.documents:
            content.update(f"{len(document.text)} {document.ends} ".encode())
            content.update(document.text.encode("utf-8", "surrogatepass"))
        path = self.folder / f"{piece.number:08d}-{content.hexdigest()}"
        try:
            splits = self.read(path)
        except (FileNotFoundError, DataError):
            splits = self.tokenise(piece)
            with path.with_suffix(".tmp").open("wb") as file:
                np.savez(file, train=splits["train"], val=splits["val"])
            path.with_suffix(".tmp").rename(path)
        return path, {split: len(tokens) for split, tokens in splits.items()}

    def read(self, path: Path) -> dict[str, np.ndarray]:
        try:
            with path.open("rb") as file, np.load(file) as splits:  # a zip file, with checksums
                return {split: splits[split] for split in ("train", "val")}
        except (zipfile.BadZipFile, ValueError, EOFError, KeyError) as error:
            raise DataError(f"{path}: {error}; prepare the data again to replace it") from error

    def read_all(self, paths: Iterable[Path], split: str) -> Iterator[np.ndarray]:
        return (self.read(path)[split] for path in paths)

    def tokenise(self, piece: Piece) -> dict[str, np.ndarray]:
        tokenizer = self.tokenizer
        end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        splits = {"train": list[int](), "val": list[int]()}
        number = piece.first_document
        for document in piece.documents:
            drawn = hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=8).digest()
            is_validation = int.from_bytes(drawn) < self.validation * 2**64
            tokens = splits["val" if is_validation else "train"]
            try:
                tokens += tokenizer.encode(document.text)
            except ValueError as error:
                raise DataError(f"{document.place}: {error}") from error
            if document.ends:
                tokens += end
                number += 1
        dtype = token_dtype(tokenizer.vocab_size)
        return {split: np.array(tokens, dtype) for split, tokens in splits.items()}


def in_parallel(
    maker: PieceMaker, pieces: Iterable[Piece], workers: int
) -> Iterator[tuple[Piece, tuple[Path, dict[str, int]]]]:
    """Each piece and what ``maker`` returns for it, in order, with few pieces in memory."""
    if workers == 1:
        yield from ((piece, maker(piece)) for piece in pieces)
        return
    # Not "fork": it would copy locks that torch's threads may hold at that moment.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=end_with_parent) as pool:
        waiting = collections.deque[Any]()
        try:
            for piece in pieces:
                waiting.append((piece, pool.submit(maker, piece)))
                if len(waiting) > 2 * workers:
                    oldest, future = waiting.popleft()
                    yield oldest, future.result()
            for piece, future in waiting:
                yield piece, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def end_with_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and do not outlive it when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
