"""nrgpt's tokenizers as Hugging Face's fast tokenizers, with the same token numbers."""

import itertools

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..data.tokenizer import END_OF_TEXT, FastTokenizer, GPT2Tokenizer, SymbolTokenizer, Tokenizer
from .tokenization import NRGPTTokenizer

END, PAD = "<end>", "<pad>"


def fast_tokenizer(tokenizer: Tokenizer, context: int, *, lisp: bool = False) -> NRGPTTokenizer:
    """Pads on the left, as generation needs it. As in our own tokenizers, a symbol that is not in
    the vocabulary is an error. ``lisp`` is ListOps' notation."""
    end: str | None = None
    if isinstance(tokenizer, GPT2Tokenizer):
        backend, end = byte_pairs(tokenizer), END_OF_TEXT
    elif isinstance(tokenizer, SymbolTokenizer):
        backend = symbols(tokenizer, lisp)
        if tokenizer.end_of_text is not None:
            end = tokenizer.symbols[tokenizer.end_of_text]
    elif isinstance(tokenizer, FastTokenizer):
        backend, end = tokenizer.backend, None
        if tokenizer.end_of_text is not None:
            end = backend.id_to_token(tokenizer.end_of_text)
    else:
        raise ValueError(f"{type(tokenizer).__name__} has no counterpart in Hugging Face's tools")
    return NRGPTTokenizer(
        tokenizer_object=backend,
        model_max_length=context,
        padding_side="left",
        truncation_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        bos_token=end,
        eos_token=end,
        pad_token=end or PAD,  # PAD gets a number that the model does not have, but never reads
    )


def symbols(tokenizer: SymbolTokenizer, lisp: bool) -> Backend:
    # Without an unknown token, an unknown symbol is an error.
    backend = Backend(models.WordLevel(tokenizer.number, unk_token=None))
    pattern = Regex(tokenizer.pattern.pattern)
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    backend.decoder = decoders.Fuse()
    if END in tokenizer.number:
        # ListOps: from the usual notation, max(7, 3) = , to the tokenizer's, max( 7 3)= , with one
        # space before each number, and no other spaces or commas.
        replaced = {r"[\s,]+": " ", r" (?![0-9])": "", r"(?<![0-9 ])(?=[0-9])": " "}
        backend.normalizer = normalizers.Sequence(
            [normalizers.Replace(Regex(old), new) for old, new in replaced.items()]
        )
        usual = [decoders.Replace(Regex(old), new) for old, new in usual_notation(tokenizer, lisp)]
        backend.decoder = decoders.Sequence([decoders.Fuse(), *usual])
    return backend


def usual_notation(tokenizer: SymbolTokenizer, lisp: bool) -> list[tuple[str, str]]:
    """What to replace in the tokens of ListOps, put together, to have them as people write them
    (nrgpt.data.listops.render): sum(max( 7 3)= becomes sum(max(7,3) =."""
    names = [symbol for symbol in tokenizer.symbols if symbol.isidentifier()]
    name, after_name = "|".join(names), "|".join(f"(?<={name})" for name in names)
    gaps = [(rf"(?:{after_name}|(?<=[0-9)]))(?=\()", " ")]
    if not lisp:
        gaps = [
            (rf"(?:{after_name}|(?<=[0-9)])) (?=[0-9])", ","),
            (rf"(?:{after_name}|(?<=[0-9)]))(?={name})", ","),
        ]
    return [
        *gaps,
        (r"(?<=\() (?=[0-9])|^ (?=[0-9])", ""),
        (r"(?<=[^ ]) ?(?==|<end>)", " "),
        (r"(?:(?<==)|(?<=<end>))(?=[^ ])", " "),
    ]


def byte_pairs(tokenizer: GPT2Tokenizer) -> Backend:
    """GPT-2's vocabulary and merges, from tiktoken's ranks. Each token was merged from two parts:
    those into which all earlier merges turn its bytes."""
    ranks = tokenizer.encoding._mergeable_ranks
    letters = bytes_to_unicode()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

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
            raise ValueError(f"{token!r} is not made of two other tokens")
        parts[best : best + 2] = [pairs[best]]
    return parts
