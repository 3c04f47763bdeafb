"""nrgpt's tokenizers as fast tokenizers of Hugging Face, with the same numbers."""

import itertools
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from ..data.tokenizer import GPT2Tokenizer, SymbolTokenizer, Tokenizer

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer

END, END_OF_TEXT, PAD = "<end>", "<|endoftext|>", "<pad>"


def fast_tokenizer(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """Texts are padded on the left, as generation wants it. Symbols that the vocabulary lacks are
    an error, as they are to our own tokenizers."""
    special: dict[str, Any]
    if isinstance(tokenizer, GPT2Tokenizer):
        backend = byte_pairs(tokenizer)
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    elif isinstance(tokenizer, SymbolTokenizer):
        backend = symbols(tokenizer)
        if END in tokenizer.number:
            special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
        else:  # a number that the model lacks: padding is never read
            special = {"pad_token": PAD}
    else:
        raise ValueError(f"{type(tokenizer).__name__} has no counterpart in Hugging Face's tools")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=context,
        padding_side="left",
        truncation_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **special,
    )


def symbols(tokenizer: SymbolTokenizer) -> Backend:
    # Without the name of an unknown token in the vocabulary, an unknown symbol is an error.
    backend = Backend(models.WordLevel(tokenizer.number, unk_token=None))
    longest_first = sorted(tokenizer.symbols, key=len, reverse=True)
    pattern = "|".join(map(escaped, longest_first))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    if END in tokenizer.number:
        backend.normalizer = listops_normalizer()
    return backend


def escaped(symbol: str) -> str:
    return "".join(f"\\x{{{ord(c):x}}}" for c in symbol)


def listops_normalizer() -> "Normalizer":
    """ListOps as people write it, max(7, 3) = , as the tokenizer's own text, max( 7 3)= : one space
    before each number, and no other space or comma."""
    return normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"[\s,]+"), " "),
            normalizers.Replace(Regex(r" (?![0-9])"), ""),
            normalizers.Replace(Regex(r"(?<![0-9 ])(?=[0-9])"), " "),
        ]
    )


def byte_pairs(tokenizer: GPT2Tokenizer) -> Backend:
    """GPT-2's vocabulary and merges from tiktoken's ranks: a token was merged from the two parts
    that the merges before it leave of its bytes."""
    ranks = tokenizer.encoding._mergeable_ranks
    letter = letters_of_bytes()

    def written(token: bytes) -> str:
        return "".join(letter[byte] for byte in token)

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = split(token, ranks, rank)
            merges.append((written(left), written(right)))
    vocabulary = {written(token): rank for token, rank in ranks.items()}
    vocabulary[END_OF_TEXT] = tokenizer.end_of_text
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def split(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """The parts of a token after all merges of lower rank."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [a + b for a, b in itertools.pairwise(parts)]
        best = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], below))
        if ranks.get(pairs[best], below) >= below:
            raise ValueError(f"{token!r} is not the merger of two other tokens")
        parts[best : best + 2] = [pairs[best]]
    return parts


def letters_of_bytes() -> dict[int, str]:
    """How GPT-2's files write bytes: printable ones as themselves, the others as what follows the
    first 256 characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in letters)
    return letters | {byte: chr(256 + i) for i, byte in enumerate(others)}
