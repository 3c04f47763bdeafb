"""Text to token numbers and back: symbols (characters, ListOps) and GPT-2's byte pairs."""

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
        if len(set(symbols)) != len(symbols) or "" in self.symbols:
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
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe

        path = os.environ.get(GPT2_RANKS)
        if path is not None:
            if not Path(path).is_file():
                raise FileNotFoundError(f"{GPT2_RANKS} = {path}: there is no such file")
            return tiktoken.Encoding(
                "gpt2",
                pat_str=GPT2_PATTERN,
                mergeable_ranks=load_tiktoken_bpe(path),
                special_tokens={"<|endoftext|>": self.end_of_text},
            )
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:
            raise OSError(
                "GPT-2's vocabulary is not on this machine and could not be downloaded; set "
                f"{GPT2_RANKS} to a local gpt2.tiktoken file"
            ) from error

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.encoding.decode([t for t in tokens if t < self.vocab_size])

    def spec(self) -> dict[str, Any]:
        return {"kind": "gpt2"}


def load_tokenizer(spec: dict[str, Any]) -> Tokenizer:
    match spec:
        case {"kind": "symbols", "symbols": list(symbols)}:
            return SymbolTokenizer(symbols)
        case {"kind": "gpt2"}:
            return GPT2Tokenizer()
    raise ValueError(f"unknown tokenizer {spec!r}; known kinds are 'symbols' and 'gpt2'")
