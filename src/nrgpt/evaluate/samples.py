"""Texts of equal length to compare: some by a model, some by people from the same dataset."""

import re

import torch
from rich.progress import Progress

from ..check import check
from ..data.shards import TokenStream
from ..data.tokenizer import Tokenizer, start_of_text
from ..decode.generate import Sampling, stream
from ..train.runs import Run

TOKENS_PER_WORD = {"characters": 12, "byte pairs": 4}  # at most


def kind_of(tokenizer: Tokenizer) -> str:
    if tokenizer.kind in TOKENS_PER_WORD:
        return tokenizer.kind
    raise ValueError("text metrics are for text; this run's tokens are ListOps' symbols")


def decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text, without the marks between documents or half a character at the end."""
    return tokenizer.decode(tokens).replace("<|endoftext|>", "\n\n").rstrip("\ufffd")


def first_words(text: str, words: int) -> str:
    """The first ``words`` words, with the spaces and line breaks between them."""
    found = re.match(rf"\s*((?:\S+\s*){{0,{words}}})", text)
    return found[1].rstrip() if found else ""


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
    """``number`` texts of ``words`` words. Each starts from the end of a document or, for
    characters, from a newline. A text is shorter if the model writes too few spaces."""
    check(number >= 2, "samples", number, "at least 2, for an interval")
    check(words >= 2, "words", words, "at least 2")
    tokenizer = run.tokenizer
    most = words * TOKENS_PER_WORD[kind_of(tokenizer)]
    start = start_of_text(tokenizer)
    texts: list[list[int]] = [[] for _ in range(number)]
    tokens = stream(
        run.model,
        [[start]] * number,
        max_new_tokens=most,
        sampling=Sampling(temperature=temperature),
        generator=torch.Generator(run.model.tokens.device).manual_seed(seed),
        steps=steps,
    )
    with Progress(disable=not progress) as bar:
        task = bar.add_task("texts", total=words)
        for i, new in enumerate(tokens, start=1):
            for row, token in new.items():
                texts[row].append(token)
            if i % 32 == 0:  # decoding after every token would be slow
                # The last word may not be complete yet.
                least = min(len(decoded(tokenizer, text).split()) for text in texts) - 1
                bar.update(task, completed=min(least, words))
                if least >= words:
                    break
    return [first_words(decoded(tokenizer, text), words) for text in texts]


def human_texts(tokens: TokenStream, tokenizer: Tokenizer, *, number: int, words: int) -> list[str]:
    """``number`` texts of ``words`` words, evenly spaced over a split. Each starts with a line if
    one starts nearby, otherwise with a word. In a short split they are shorter and may overlap."""
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
