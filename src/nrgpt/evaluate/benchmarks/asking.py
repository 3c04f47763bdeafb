"""The benchmarks without lm-eval, which may not be installed: the same questions and scores."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...data.tokenizer import start_of_text
from ...train.runs import Run
from ..likelihood import likelihoods
from .questions import BY_CHOICE, BY_CONTEXT, FIELDS, Question, questions

Pair = tuple[str, str]
MOST_NATS = 700
"""Of which a perplexity is still a number."""
WITHOUT_ANSWER = {"openbookqa"}
"""Their questions are beginnings of sentences."""


def ask(
    run: Run,
    name: str,
    folder: Path | None = None,
    *,
    limit: int | None = None,
    steps: int | None = None,
    batch_size: int = 64,
) -> dict[str, float]:
    """A benchmark's metrics, named as in its task file."""
    asked = questions(name, folder)[:limit]
    pairs = [pairs_of(name, question) for question in asked]
    encoded = [encode(run, *pair) for some in pairs for pair in some]
    found = iter(likelihoods(run.model, encoded, steps=steps, batch_size=batch_size).scores)
    marks = []
    for question, some in zip(asked, pairs, strict=True):
        marks.append(marks_of(name, question, some, [next(found) for _ in some]))
    metrics = {}
    for metric in dict.fromkeys(metric for mark in marks for metric in mark):
        values = [mark[metric] for mark in marks if metric in mark]
        metrics[metric] = sum(values) / len(values)
    if name == "lambada":
        nats = -metrics.pop("log-likelihood")
        metrics["perplexity"] = math.exp(nats) if nats < MOST_NATS else math.inf
    return metrics | {"questions": float(len(asked))}


def pairs_of(name: str, question: Question) -> list[Pair]:
    """What is compared: contexts and their continuations."""
    if name == "blimp":
        return [("", question["sentence_bad"]), ("", question["sentence_good"])]
    if FIELDS[name] == BY_CONTEXT:
        return [(one, f" {question['continuation']}") for one in question["context_options"]]
    if FIELDS[name] == BY_CHOICE:
        end = "" if name in WITHOUT_ANSWER else "\nAnswer:"
        return [(question["query"] + end, f" {choice}") for choice in question["choices"]]
    return [(question["context"], f" {question['continuation']}")]


def encode(run: Run, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """As lm-eval does it: a space between the two belongs to the continuation, and the tokens of
    both together are what counts."""
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    if not bare:
        return [start_of_text(run.tokenizer)], run.encode(continuation)
    before = run.encode(bare)
    return before, run.encode(bare + continuation)[len(before) :]


def marks_of(
    name: str, question: Mapping[str, Any], pairs: list[Pair], found: list[tuple[float, bool]]
) -> dict[str, float]:
    """Of one question. Among equals the first counts; in BLiMP, where the bad sentence comes first,
    the good one must be likelier."""
    values = [value for value, _ in found]
    if name == "lambada":
        return {"acc": float(found[0][1]), "log-likelihood": values[0]}
    right = 1 if name == "blimp" else question["gold"]
    marks = {"acc": float(values.index(max(values)) == right)}
    if name == "blimp":
        marks[question["field"].replace("/", "_")] = marks["acc"]
    elif FIELDS[name] == BY_CHOICE:
        lengths = (len(text) - 1 for _, text in pairs)  # without the space
        scaled = [value / length for value, length in zip(values, lengths, strict=True)]
        marks["acc_norm"] = float(scaled.index(max(scaled)) == right)
    return marks
