"""Text to tokens and back: symbols (characters, ListOps) and GPT-2's byte-pair encoding."""

import base64
import functools
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tiktoken

GPT2_RANKS = "NRGPT_GPT2_RANKS"
"""Environment variable: a local copy of gpt2.tiktoken, GPT-2's ranks, for machines offline."""

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT2_SHA256 = "9f5c51677dd3f37bbf0ab2017579262cac437eb5f140a8efb53a235dbdb3ce0b"
"""Of all tokens by rank, in base 64, one per line."""


class Tokenizer(ABC):
    vocab_size: int

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str: ...

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """What load_tokenizer needs to build this again, for JSON."""

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
        self.is_characters = all(len(symbol) == 1 for symbol in symbols)

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
    end_of_text = 50_256

    @property
    def encoding(self) -> "tiktoken.Encoding":
        return gpt2_encoding(os.environ.get(GPT2_RANKS))

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.encoding.decode([t for t in tokens if t < self.vocab_size])

    def spec(self) -> dict[str, Any]:
        return {"kind": "gpt2"}


@functools.cache
def gpt2_encoding(path: str | None) -> "tiktoken.Encoding":
    """GPT-2's encoding, from a file of its ranks or from tiktoken, which may download it."""
    try:
        import tiktoken
    except ImportError:
        raise ValueError("GPT-2's encoding needs tiktoken: pip install 'nrgpt[data]'") from None

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


def load_tokenizer(spec: dict[str, Any]) -> Tokenizer:
    match spec:
        case {"kind": "symbols", "symbols": list(symbols)}:
            return SymbolTokenizer(symbols)
        case {"kind": "gpt2"}:
            return GPT2Tokenizer()
    raise ValueError(f"unknown tokenizer {spec!r}; known kinds are 'symbols' and 'gpt2'")
