"""Tokenise any text into shards: local files, or a dataset from the Hugging Face Hub.

Documents are read in order and gathered into pieces. Workers tokenise each piece into a file in
FOLDER.partial, and these files become the shards at the end. The name of such a file has a hash of
everything that determines its content, so that a run that was killed can use what it had finished.
"""

import dataclasses
import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
import zipfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, TextColumn

from ..check import check
from ..files import open_ours
from .documents import (
    PIECE_CHARACTERS,
    Document,
    Piece,
    documents_of_all,
    gather,
    open_source,
)
from .own import tokenizer_for
from .position import HubSource, Journal, Made, Source
from .shards import DataError, refuse_existing, token_dtype, working_folder, write_dataset
from .tokenizer import END_OF_TEXT, Tokenizer

OPENWEBTEXT = "Skylion007/openwebtext"
USUAL_SHARE = 0.0005
"""Of documents, for validation."""
ENOUGH = 50_000
"""Tokens for validation. With fewer, the end of the text is taken, up to so many."""
END_SHARE = 0.1
JOURNAL = "journal.jsonl"


def prepare_text(
    sources: Sequence[Path],
    folder: Path,
    *,
    separator: str = END_OF_TEXT,
    field: str = "text",
    tokenizer: Tokenizer | str = "auto",
    vocabulary: int | None = None,
    **options: Any,
) -> None:
    """Tokenise local files (.txt, .txt.xz, .jsonl, .parquet) into the dataset ``folder``.

    In text files, a line that is exactly ``separator`` ends a document. In .jsonl and .parquet
    files, each line or row is a document, with its text in ``field``. ``tokenizer`` is one, or how
    to make it from the text (nrgpt.data.own). ``options`` go to prepare_documents.
    """
    check(len(sources) > 0, "sources", sources, "at least one file")
    refuse_existing(folder.absolute())

    def documents() -> Iterator[Document]:
        readers = [open_source(path, separator, field) for path in sources]
        return documents_of_all(zip(sources, readers, strict=True))

    files = [{"name": path.name, "bytes": path.stat().st_size} for path in map(checked, sources)]
    total = sum(path.stat().st_size for path in sources)
    if isinstance(tokenizer, str):
        texts = lambda: (document.text for document in documents())  # noqa: E731
        shown = {"progress": options.get("progress", True)}
        tokenizer = tokenizer_for(tokenizer, texts, total, vocabulary, **shown)
    facts = {"kind": "text", "files": files}
    prepare_documents(Source(documents), folder, facts, total, tokenizer=tokenizer, **options)


def checked(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    return path


def prepare_hub(
    name: str,
    folder: Path,
    *,
    split: str = "train",
    field: str = "text",
    tokenizer: Tokenizer | str = "gpt2",
    vocabulary: int | None = None,
    **options: Any,
) -> None:
    """Tokenise a dataset from the Hugging Face Hub, such as OPENWEBTEXT, while it downloads.
    ``options`` go to prepare_documents."""
    source = HubSource(name, split, field)
    if isinstance(tokenizer, str):
        texts = lambda: (document.text for document in source.documents())  # noqa: E731
        shown = {"progress": options.get("progress", True)}
        tokenizer = tokenizer_for(tokenizer, texts, None, vocabulary, **shown)
    facts = {"kind": "hub", "name": name, "split": split}
    prepare_documents(source, folder, facts, source.rows, tokenizer=tokenizer, **options)


def prepare_documents(
    source: Source,
    folder: Path,
    facts: Mapping[str, Any],
    total: int | None,
    *,
    tokenizer: Tokenizer,
    validation: float | None = None,
    seed: int = 0,
    workers: int | None = None,
    shard_tokens: int = 100_000_000,
    progress: bool = True,
) -> None:
    """Tokenise documents into a dataset. After an interruption, the same call continues, from where
    the source can go on. ``facts`` about it are kept with the dataset.

    A hash of the seed and a document's number decides whether it is in the split "val", with
    probability ``validation``. None: 0.0005, but if too few tokens fall to "val" in this way, as in
    a single book, it gets the last tenth of the text. The result does not depend on the number of
    workers.
    """
    adapts, share = validation is None, USUAL_SHARE if validation is None else validation
    check(0 <= share < 1, "validation", share, "in [0, 1)")
    if workers is None:  # another process takes seconds to start
        workers = 2 if total is None or total > 4 * PIECE_CHARACTERS else 1
    check(workers >= 1, "workers", workers, "at least 1")
    check(shard_tokens >= 1, "shard_tokens", shard_tokens, "at least 1")
    folder = folder.absolute()
    refuse_existing(folder)
    tokenizer.encode("")  # if something is missing, fail here and not in every worker
    partial = folder.with_name(folder.name + ".partial")
    _, *usual = Progress.get_default_columns()
    columns = (
        TextColumn("{task.description}", markup=False),
        *usual,
        TextColumn("{task.fields[tokens]:,} tokens", markup=False),
    )
    with working_folder(partial):

        def tokenise(share: float) -> tuple[PieceMaker, list[Path], Counter[str], int]:
            maker = PieceMaker(partial, tokenizer, seed, share)
            settings = {"facts": facts, "tokenizer": tokenizer.fingerprint(), "seed": seed}
            journal = Journal(partial / JOURNAL, settings | {"share": share})
            made = journal.begin(maker.is_whole)
            paths = [partial / Path(one.file).name for one in made]
            tokens = sum((Counter(one.tokens) for one in made), Counter[str]())
            number = sum(one.documents for one in made)
            after, read = (made[-1].after, made[-1].read) if made else (None, 0)
            with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
                task = bar.add_task(
                    f"tokenising {folder.name}", total=total, completed=read, tokens=tokens.total()
                )
                documents = source.documents(after, read)
                pieces = gather(documents, source.state, len(made), number)
                for piece, (path, counts) in in_parallel(maker, pieces, workers):
                    paths.append(path)
                    tokens.update(counts)
                    ended, read = sum(d.ends for d in piece.documents), piece.documents[-1].read
                    number += ended
                    journal.add(Made(path.name, counts, ended, read, piece.after))
                    bar.update(task, completed=read, tokens=tokens.total())
            return maker, paths, tokens, number

        maker, paths, tokens, number = tokenise(share)
        takes_end = adapts and tokens["val"] < min(ENOUGH, tokens.total() * END_SHARE)
        if takes_end:
            maker, paths, tokens, number = tokenise(0)
            first = tokens["train"] - min(ENOUGH, int(tokens["train"] * END_SHARE))
            train = lambda: maker.read_all(paths, "train")  # noqa: E731
            pieces = {"train": between(train(), 0, first), "val": between(train(), first, None)}
            tokens = Counter(train=first, val=tokens["train"] - first)
        else:
            splits = ["train", "val"] if share > 0 else ["train"]
            pieces = {split: maker.read_all(paths, split) for split in splits}
        if adapts and not all(tokens[split] for split in pieces):
            raise DataError(
                f"{tokens.total()} tokens of text are too few for training and validation"
            )
        for split in pieces:
            wanted = f"such that some of the {number} documents are in split {split!r}"
            check(tokens[split] > 0, "validation", share, wanted)
        kept = "the end" if takes_end else share
        told = {**facts, "documents": number, "validation": kept, "seed": seed}
        write_dataset(folder, tokenizer, pieces, source=told, shard_tokens=shard_tokens)
        shutil.rmtree(partial)


def between(arrays: Iterable[np.ndarray], first: int, last: int | None) -> Iterator[np.ndarray]:
    """The part from element ``first`` to ``last`` of arrays that follow one another."""
    before = 0
    for array in arrays:
        begin, end = max(0, first - before), None if last is None else max(0, last - before)
        part = array[begin:end]
        if len(part):
            yield part
        before += len(array)


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
            unfinished = path.with_suffix(".tmp")
            unfinished.unlink(missing_ok=True)
            with open_ours(unfinished, "xb") as file:
                np.savez(file, train=splits["train"], val=splits["val"])
            unfinished.replace(path)
        return path, {split: len(tokens) for split, tokens in splits.items()}

    def is_whole(self, path: Path) -> bool:
        try:
            return bool(self.read(path))
        except (DataError, OSError):
            return False

    def read(self, path: Path) -> dict[str, np.ndarray]:
        try:
            with path.open("rb") as file, np.load(file) as splits:  # a zip file, with checksums
                return {split: splits[split] for split in ("train", "val")}
        except (zipfile.BadZipFile, ValueError, EOFError, KeyError, RecursionError) as error:
            raise DataError(f"{path}: {error}; prepare the data again to replace it") from error

    def read_all(self, paths: Iterable[Path], split: str) -> Iterator[np.ndarray]:
        try:
            yield from (self.read(path)[split] for path in paths)
        except FileNotFoundError as error:
            raise DataError(
                f"{error.filename} has vanished since it was written; run the same command again"
            ) from error

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
        waiting = deque[Any]()
        try:
            for piece in pieces:
                waiting.append((piece, pool.submit(maker, piece)))
                if len(waiting) > 2 * workers:
                    oldest, future = waiting.popleft()
                    yield oldest, future.result()
            for piece, future in waiting:
                yield piece, future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a process that tokenises was killed (out of memory?); the same command continues"
            ) from error
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
