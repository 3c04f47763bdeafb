"""Tokenizers for texts of one's own: their characters, or byte pairs trained on them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..check import check, check_choice
from ..extras import need
from .shards import DataError
from .tokenizer import END_OF_TEXT, FastTokenizer, GPT2Tokenizer, SymbolTokenizer, Tokenizer

Choice = Literal["auto", "characters", "bpe", "gpt2"]
SMALL = 2_000_000
"""Bytes of text up to which characters are enough for auto."""
MOST_CHARACTERS = 300
"""Distinct ones; a text with more is for byte pairs."""
LARGEST = 1_000_000
"""Byte pairs: the library takes the memory for them at once, and ends the process without it."""
TRAINED_ON = 200_000_000
"""Characters from which byte pairs are learned, at most."""


def tokenizer_for(
    choice: str,
    texts: Callable[[], Iterable[str]],
    size: int | None,
    vocabulary: int | None = None,
    *,
    progress: bool = False,
) -> Tokenizer:
    """A tokenizer for ``texts``, documents that may be read more than once; ``size`` in bytes, if
    known. auto: characters for a small text that has few of them, else byte pairs."""
    check_choice("tokenizer", choice, get_args(Choice))
    if vocabulary is not None and choice in ("characters", "gpt2"):
        raise ValueError(
            f"vocabulary = {vocabulary}: tokenizer = {choice!r} has its own; leave it out"
        )
    if choice == "gpt2":
        return GPT2Tokenizer()
    is_small = choice == "auto" and vocabulary is None and size is not None and size <= SMALL
    if choice == "characters" or is_small:
        with at_work("reading all characters", progress):
            found = characters(texts())
        if choice == "characters" or found.vocab_size <= MOST_CHARACTERS:
            return found
    with at_work("learning byte pairs", progress):
        return byte_pairs(texts(), vocabulary or usual_vocabulary(size))


@contextmanager
def at_work(what: str, progress: bool) -> Iterator[None]:
    """A bar without an end, on terminals: how much is left is not known."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    is_shown = progress and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as bar:
        bar.add_task(what, total=None)
        yield


def characters(texts: Iterable[str]) -> SymbolTokenizer:
    """All characters that occur, and a mark between documents if there are several."""
    counts = Counter[str]()
    documents = 0
    for text in texts:
        counts.update(set(text))
        documents += 1
    if not counts:
        raise DataError("there is no text")
    return SymbolTokenizer([*sorted(counts), *([END_OF_TEXT] if documents > 1 else [])])


def usual_vocabulary(size: int | None) -> int:
    """A power of two that grows with the text: 512 up to 1 MB, 32,768 from 64 MB on."""
    size = TRAINED_ON if size is None else size
    return min(32_768, max(512, 1 << (size // 2_000).bit_length()))


def byte_pairs(texts: Iterable[str], vocabulary: int) -> FastTokenizer:
    """Byte pairs learned from the texts, with GPT-2's rules for where words end."""
    must_be = f"at least 257 (all bytes and the end of text) and at most {LARGEST:,}"
    check(257 <= vocabulary <= LARGEST, "vocabulary", vocabulary, must_be)
    library: Any = need("tokenizers", "learning byte pairs (--tokenizer bpe)", "data")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(first_characters(texts, TRAINED_ON), trainer)
    return FastTokenizer(made.to_str())


def first_characters(texts: Iterable[str], most: int) -> Iterator[str]:
    taken = 0
    for text in texts:
        if taken >= most:
            return
        taken += len(text)
        yield text
