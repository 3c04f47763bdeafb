"""Text to token numbers and back: symbols (characters, ListOps) and GPT-2's byte pairs."""

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
"""Environment variable: a local file of GPT-2's ranks (gpt2.tiktoken), for machines offline."""

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


GPT2_SHA256 = "9f5c51677dd3f37bbf0ab2017579262cac437eb5f140a8efb53a235dbdb3ce0b"
"""Of all tokens in the order of their ranks, in base 64, a line each."""


class Tokenizer(ABC):
    vocab_size: int

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str: ...

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """What JSON must hold for load_tokenizer to build this again."""

    def fingerprint(self) -> str:
        """sha256 of everything that decides which token is which."""
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
        try:
            if self.is_characters:
                return [self.number[c] for c in text]
            tokens = self.pattern.findall(text)
            if sum(map(len, tokens)) == len(text):
                return [self.number[token] for token in tokens]
        except KeyError:
            pass
        at = self.first_unknown(text)
        raise ValueError(
            f"{text[at]!r} at position {at} is not in this vocabulary of {self.vocab_size} symbols"
        )

    def first_unknown(self, text: str) -> int:
        at = 0
        while match := self.pattern.match(text, at):
            at = match.end()
        return at

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.symbols[token] for token in tokens)

    def spec(self) -> dict[str, Any]:
        return {"kind": "symbols", "symbols": self.symbols}


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding (tiktoken). ``<|endoftext|>`` is token 50256."""

    vocab_size = 50_257
    end_of_text = 50_256

    @functools.cached_property
    def encoding(self) -> "tiktoken.Encoding":
        try:
            import tiktoken
        except ImportError:
            raise ValueError(
                "GPT-2's byte pairs need tiktoken: pip install 'nrgpt[data]'"
            ) from None

        path = os.environ.get(GPT2_RANKS)
        if path is not None:
            return tiktoken.Encoding(
                "gpt2",
                pat_str=GPT2_PATTERN,
                mergeable_ranks=read_ranks(Path(path)),
                special_tokens={"<|endoftext|>": self.end_of_text},
            )
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError:
            raise ValueError(
                "GPT-2's vocabulary is not on this machine and could not be downloaded; set "
                f"{GPT2_RANKS} to a local gpt2.tiktoken file"
            ) from None

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.encoding.decode([t for t in tokens if t < self.vocab_size])

    def spec(self) -> dict[str, Any]:
        return {"kind": "gpt2"}


def read_ranks(path: Path) -> dict[bytes, int]:
    """A gpt2.tiktoken file: a token in base 64 and its rank in each line."""
    if not path.is_file():
        raise FileNotFoundError(f"{GPT2_RANKS} = {path}: there is no such file")
    try:
        lines = [line.split() for line in path.read_bytes().splitlines()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ValueError(f"{GPT2_RANKS} = {path}: not a file of ranks ({error})") from error
    ordered = b"".join(
        base64.b64encode(token) + b"\n" for token in sorted(ranks, key=ranks.__getitem__)
    )
    if hashlib.sha256(ordered).hexdigest() != GPT2_SHA256:
        raise ValueError(f"{GPT2_RANKS} = {path}: these are not GPT-2's ranks")
    return ranks


def load_tokenizer(spec: dict[str, Any]) -> Tokenizer:
    match spec:
        case {"kind": "symbols", "symbols": list(symbols)}:
            return SymbolTokenizer(symbols)
        case {"kind": "gpt2"}:
            return GPT2Tokenizer()
    raise ValueError(f"unknown tokenizer {spec!r}; known kinds are 'symbols' and 'gpt2'")
