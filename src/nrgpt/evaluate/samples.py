"""Texts of one length to compare: written by a model, and by people in the same dataset."""

import re

import torch
from rich.progress import Progress

from ..check import check
from ..data.shards import TokenStream
from ..data.tokenizer import GPT2Tokenizer, SymbolTokenizer, Tokenizer
from ..decode.generate import Sampling, stream
from ..train.runs import Run

LOOKED_AT = 32
"""Tokens between two looks at whether the texts are long enough."""

TOKENS_PER_WORD = {"characters": 12, "byte pairs": 4}
"""Generation stops at so many, however few words there are."""


def kind_of(tokenizer: Tokenizer) -> str:
    if isinstance(tokenizer, GPT2Tokenizer):
        return "byte pairs"
    if isinstance(tokenizer, SymbolTokenizer) and tokenizer.is_characters:
        return "characters"
    raise ValueError("text metrics are for text; this run's tokens are ListOps' symbols")


def decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Without what stands between documents, and without half a character at the end."""
    text = tokenizer.decode(tokens).replace("<|endoftext|>", "\n\n")
    return text.rstrip("\ufffd")


def first_words(text: str, words: int) -> str:
    """The first so many words as they stand, line breaks too."""
    text = text.lstrip()
    ends = [match.end() for _, match in zip(range(words), re.finditer(r"\S+", text), strict=False)]
    return text[: ends[-1]] if ends else ""


def model_texts(
    run: Run,
    *,
    number: int,
    words: int,
    temperature: float = 0.8,
    steps: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> list[str]:
    """So many texts of so many words, each begun from nothing: from the end of a document or, of
    characters, a newline. One may come out shorter, if the model will not part its words."""
    check(number >= 2, "samples", number, "at least 2, for an interval")
    check(words >= 2, "words", words, "at least 2")
    tokenizer = run.tokenizer
    most = words * TOKENS_PER_WORD[kind_of(tokenizer)]
    generator = torch.Generator(run.model.tokens.device).manual_seed(seed)
    texts: list[list[int]] = [[] for _ in range(number)]
    sampling = Sampling(temperature=temperature)
    tokens = stream(
        run.model,
        [[beginning(tokenizer)]] * number,
        max_new_tokens=most,
        sampling=sampling,
        generator=generator,
        steps=steps,
    )
    with Progress(disable=not progress) as bar:
        task = bar.add_task("texts", total=words)
        for i, new in enumerate(tokens, start=1):
            for row, token in new.items():
                texts[row].append(token)
            if i % LOOKED_AT == 0:
                # One more than needed: the last word may go on.
                least = min(len(decoded(tokenizer, text).split()) for text in texts) - 1
                bar.update(task, completed=min(least, words))
                if least >= words:
                    break
    return [first_words(decoded(tokenizer, text), words) for text in texts]


def beginning(tokenizer: Tokenizer) -> int:
    if isinstance(tokenizer, GPT2Tokenizer):
        return tokenizer.end_of_text
    assert isinstance(tokenizer, SymbolTokenizer)
    return tokenizer.number.get("\n", 0)


def human_texts(tokens: TokenStream, tokenizer: Tokenizer, *, number: int, words: int) -> list[str]:
    """So many texts of so many words, evenly spaced over a split, each from the start of a line if
    there is one nearby, else of a word. A short split has shorter texts, which may overlap."""
    span = words * TOKENS_PER_WORD[kind_of(tokenizer)]
    texts = []
    for i in range(number):
        start = min(i * len(tokens) // number, max(0, len(tokens) - span))
        read = tokens.read(start, min(span, len(tokens) - start)).tolist()
        text = decoded(tokenizer, read).lstrip("\ufffd")
        if start > 0:
            near = text[: len(text) // 4]
            cut = near.find("\n") if "\n" in near else near.find(" ")
            text = text[cut + 1 :]
        texts.append(first_words(text, words))
    return texts
