"""Text to tokens and back: symbols (characters, ListOps), GPT-2's byte pairs, and any tokenizer of
the library ``tokenizers``, such as byte pairs of one's own."""

import base64
import functools
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..extras import need

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
RANKS = "gpt2.tiktoken"
"""File beside a dataset, and in a run folder: GPT-2's ranks."""
GPT2_RANKS = "NRGPT_GPT2_RANKS"
"""Environment variable: a local copy of gpt2.tiktoken, GPT-2's ranks, for machines offline."""

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT2_SHA256 = "9f5c51677dd3f37bbf0ab2017579262cac437eb5f140a8efb53a235dbdb3ce0b"
"""Of all tokens by rank, in base 64, one per line."""


Kind = Literal["characters", "symbols", "byte pairs"]


class Tokenizer(ABC):
    vocab_size: int
    kind: Kind = "symbols"
    end_of_text: int | None = None
    """The token between documents, if there is one; a text that it ends is over."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocab_size:,} {self.kind})"

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str: ...

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """What load_tokenizer needs to build this again, for JSON."""

    def companions(self) -> dict[str, bytes]:
        """Files, by name, that must lie beside the spec wherever it goes."""
        return {}

    def byte_lengths(self) -> list[int] | None:
        """Of byte pairs: how many bytes of text each token stands for."""
        return None

    def missing(self) -> str | None:
        """Why texts cannot be encoded and decoded on this machine, or None if they can."""
        try:
            self.encode("")
        except (ValueError, OSError) as error:
            return str(error)
        return None

    def fingerprint(self) -> str:
        """The sha256 of ``spec``, which defines every token."""
        return hashlib.sha256(json.dumps(self.spec(), sort_keys=True).encode()).hexdigest()


class SymbolTokenizer(Tokenizer):
    """One token for each symbol; a symbol may be a character or a word such as ``max``."""

    def __init__(self, symbols: Sequence[str]):
        self.symbols = list(symbols)
        if not symbols or len(set(symbols)) != len(symbols) or "" in self.symbols:
            raise ValueError(f"symbols must be distinct and not empty: {self.symbols}")
        self.vocab_size = len(symbols)
        self.number = {symbol: i for i, symbol in enumerate(symbols)}
        longest_first = sorted(symbols, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)), re.DOTALL)
        is_characters = all(len(symbol) == 1 for symbol in symbols if symbol != END_OF_TEXT)
        self.kind = "characters" if is_characters else "symbols"
        self.end_of_text = self.number.get("<end>", self.number.get(END_OF_TEXT))

    def encode(self, text: str) -> list[int]:
        tokens = self.pattern.findall(text)
        if sum(map(len, tokens)) == len(text):
            return [self.number[token] for token in tokens]
        at = 0
        while match := self.pattern.match(text, at):
            at = match.end()
        raise ValueError(
            f"{text[at]!r} at position {at} is not in this vocabulary of {self.vocab_size} symbols"
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """A model may have more tokens than there are symbols; these become \ufffd."""
        known, size = self.symbols, self.vocab_size
        return "".join(known[token] if 0 <= token < size else "\ufffd" for token in tokens)

    def spec(self) -> dict[str, Any]:
        return {"kind": "symbols", "symbols": self.symbols}


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding (tiktoken). ``<|endoftext|>`` is token 50256."""

    vocab_size = 50_257
    kind = "byte pairs"
    end_of_text = 50_256

    def __init__(self, ranks: Path | None = None):
        """``ranks``: the file of ranks that lies beside a dataset or in a run folder."""
        self.ranks = ranks

    @property
    def encoding(self) -> "tiktoken.Encoding":
        return gpt2_encoding(os.environ.get(GPT2_RANKS) if self.ranks is None else str(self.ranks))

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.encoding.decode([t for t in tokens if t < self.vocab_size])

    def spec(self) -> dict[str, Any]:
        return {"kind": "gpt2"}

    def companions(self) -> dict[str, bytes]:
        try:
            return {RANKS: written_ranks(self.encoding._mergeable_ranks)}
        except (ValueError, OSError):  # not at hand; a training says so at its start
            return {}

    def byte_lengths(self) -> list[int]:
        single = self.encoding.decode_single_token_bytes
        return [len(single(t)) if t != self.end_of_text else 0 for t in range(self.vocab_size)]


class FastTokenizer(Tokenizer):
    """A tokenizer of the library ``tokenizers``, from the text of its tokenizer.json."""

    def __init__(self, text: str):
        self.text = text
        library: Any = need("tokenizers", "this tokenizer", "data")
        try:
            self.backend = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"not a tokenizer of the library tokenizers ({error})") from error
        self.backend.no_padding()
        self.backend.no_truncation()
        self.backend.encode_special_tokens = True  # a text cannot smuggle in its own end
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=False)
        self.is_byte_level = type(self.backend.decoder).__name__ == "ByteLevel"
        added = self.backend.get_added_tokens_decoder()
        names = {token.content: number for number, token in added.items()}
        known = {name: self.backend.token_to_id(name) for name in (END_OF_TEXT, "<end>")}
        numbers = [number for number in (names | known).values() if number is not None]
        ends = [known[name] for name in known if known[name] is not None]
        self.end_of_text = ends[0] if ends else None
        if self.is_byte_level:
            self.kind = "byte pairs"
            self.vocab_size = max(self.vocab_size, *(number + 1 for number in numbers), 0)
        elif self.end_of_text is None:
            self.kind = "characters"

    def encode(self, text: str) -> list[int]:
        try:
            return list(self.backend.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"{unknown_part(text, self.backend)}, of {self.vocab_size}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if token < self.vocab_size]
        return str(self.backend.decode(known, skip_special_tokens=False))

    def spec(self) -> dict[str, Any]:
        return {"kind": "tokenizers", "json": self.text}

    def byte_lengths(self) -> list[int] | None:
        if not self.is_byte_level:
            return None
        names = [self.backend.id_to_token(t) or "" for t in range(self.vocab_size)]
        return [0 if t == self.end_of_text else len(name) for t, name in enumerate(names)]

    def __reduce__(self) -> tuple[Any, ...]:
        return FastTokenizer, (self.text,)


def start_of_text(tokenizer: Tokenizer) -> int:
    """What precedes a text that has nothing before it: the end of another, or a newline."""
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text
    try:
        return tokenizer.encode("\n")[-1]
    except ValueError:
        raise ValueError(
            "a text without a context needs a token before it, and this vocabulary has neither an "
            "end of text nor a newline"
        ) from None


def unknown_part(text: str, backend: Any) -> str:
    """What of a text is not in a vocabulary of whole words or characters."""
    vocabulary = backend.get_vocab()
    shown = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    parts = backend.pre_tokenizer.pre_tokenize_str(shown) if backend.pre_tokenizer else []
    unknown, at = next(
        ((part, span[0]) for part, span in parts if part not in vocabulary), (text, 0)
    )
    unknown = unknown.strip() or unknown
    if shown != text:  # places are those of the normalised text
        at = text.find(unknown) if text.count(unknown) == 1 else -1
    place = f" at position {at}" if at >= 0 else ""
    return f"{unknown!r}{place} is not in this vocabulary"


@functools.cache
def gpt2_encoding(path: str | None) -> "tiktoken.Encoding":
    """GPT-2's encoding, from a file of its ranks or from tiktoken, which may download it."""
    tiktoken = need("tiktoken", "GPT-2's encoding", "data")
    if path is not None:
        special, ranks = {"<|endoftext|>": GPT2Tokenizer.end_of_text}, read_ranks(Path(path))
        return tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError:
        raise ValueError(
            "GPT-2's vocabulary is not on this machine and could not be downloaded; set "
            f"{GPT2_RANKS} to a local gpt2.tiktoken file"
        ) from None


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a gpt2.tiktoken file: on each line a token in base 64, and its rank."""
    if not path.is_file():
        raise FileNotFoundError(f"{GPT2_RANKS} = {path}: there is no such file")
    try:
        lines = [line.split() for line in path.read_bytes().splitlines()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ValueError(f"{GPT2_RANKS} = {path}: not a file of ranks ({error})") from error
    ordered = (base64.b64encode(token) + b"\n" for token in sorted(ranks, key=ranks.__getitem__))
    if hashlib.sha256(b"".join(ordered)).hexdigest() != GPT2_SHA256:
        raise ValueError(f"{GPT2_RANKS} = {path}: these are not GPT-2's ranks")
    return ranks


def written_ranks(ranks: dict[bytes, int]) -> bytes:
    """The contents of a gpt2.tiktoken file."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ordered)


def load_tokenizer(spec: dict[str, Any], folder: Path | None = None) -> Tokenizer:
    """The tokenizer of a spec; its companions are in ``folder``."""
    match spec:
        case {"kind": "symbols", "symbols": list(symbols)}:
            return SymbolTokenizer(symbols)
        case {"kind": "gpt2"}:
            has_ranks = folder is not None and (folder / RANKS).is_file()
            return GPT2Tokenizer(folder / RANKS if folder is not None and has_ranks else None)
        case {"kind": "tokenizers", "json": str(text)}:
            return FastTokenizer(text)
    raise ValueError(
        f"unknown tokenizer {spec!r}; known kinds are 'symbols', 'gpt2' and 'tokenizers'"
    )
