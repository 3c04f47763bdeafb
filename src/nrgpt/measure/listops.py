"""Accuracy on ListOps: greedy, over all tests, with intervals, by function and by depth."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..check import check
from ..data.listops import MARKS, TestExpression, render
from ..data.tokenizer import SymbolTokenizer, Tokenizer
from ..decode.generate import CacheKind, generate
from ..model.network import Network

SHOWN = 3  # how many examples, and how many mistakes, a result keeps
Z_95 = 1.959964  # 95 % of a normal distribution lies within this many standard deviations
SCORE_HEADINGS = ("tests", "correct", "of", "accuracy")
Group = TypeVar("Group", str, int)


def empty_table(title: str, first: str, *others: str) -> Table:
    """Columns with these headings, right-aligned except for the first."""
    table = Table(title=title)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


@dataclass(frozen=True)
class Score:
    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval, which also holds near 0 and 1 and for few tests."""
        n, p = self.total, self.accuracy
        centre = p + Z_95**2 / (2 * n)
        spread = Z_95 * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n**2))
        scale = 1 + Z_95**2 / n
        # Rounding could push an end below 0 or above 1.
        return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)

    def cells(self, digits: int) -> list[str]:
        """For a table: correct, total and accuracy."""
        return [f"{self.correct:,}", f"{self.total:,}", f"{100 * self.accuracy:.{digits}f} %"]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"accuracy": self.accuracy, "interval": list(self.interval)}


@dataclass(frozen=True)
class Example:
    """A test and the model's answer, in ordinary notation."""

    prompt: str
    generated: str
    answer: int
    is_correct: bool


@dataclass(frozen=True)
class ListOpsResult(Score):
    """The tests in which the final number is right and the model stops after it, and more."""

    chains: Score  # tests in which every token of the solution is right
    per_function: dict[str, Score]  # answers by outermost function
    per_depth: dict[int, Score]  # answers by depth of nesting
    examples: tuple[Example, ...]  # the first tests, right or wrong
    mistakes: tuple[Example, ...]  # the first wrong answers

    @property
    def answers(self) -> Score:
        return Score(self.correct, self.total)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self.answers.as_dict() | {
            "chains": self.chains.as_dict(),
            "per_function": {name: score.as_dict() for name, score in self.per_function.items()},
            "per_depth": {str(depth): score.as_dict() for depth, score in self.per_depth.items()},
            "examples": [asdict(example) for example in self.examples],
            "mistakes": [asdict(example) for example in self.mistakes],
        }

    def table(self) -> Table:
        scores = {"answers": self.answers, "whole chains": self.chains}
        scores |= {f"{name}(...)": score for name, score in self.per_function.items()}
        scores |= {f"depth {depth}": score for depth, score in self.per_depth.items()}
        table = empty_table("ListOps, greedy, all tests", *SCORE_HEADINGS, "95 % interval")
        for name, score in scores.items():
            low, high = score.interval
            interval = f"{100 * low:.2f} - {100 * high:.2f} %"
            table.add_row(name, *score.cells(digits=2), interval)
        return table


def listops_accuracy(
    model: Network,
    tests: Sequence[TestExpression],
    tokenizer: Tokenizer,
    *,
    batch_size: int = 256,
    steps: int | None = None,
    cache: CacheKind = "exact",
    progress: bool = False,
) -> ListOpsResult:
    """Let the model solve every test, with greedy decoding.

    An answer is right if it is the only token after the last ``=`` (if there is none, the only
    token) and the model stops there. The model may use as many tokens as the longest solution.
    ``steps`` are inference steps, by default as in training.
    """
    check(batch_size >= 1, "batch_size", batch_size, "at least 1")
    if not tests:
        raise ValueError("tests is empty; read_tests reads those of a ListOps dataset")
    if not isinstance(tokenizer, SymbolTokenizer) or not set(MARKS) <= set(tokenizer.symbols):
        marks = " ".join(MARKS)
        raise ValueError(f"tokenizer: must be that of a ListOps dataset, with the marks {marks}")
    vocabulary, context = model.cfg.vocab_size, model.cfg.context
    must_be = f"at least the tokenizer's, {tokenizer.vocab_size}"
    check(vocabulary >= tokenizer.vocab_size, "the model's vocab_size", vocabulary, must_be)
    longest = max(len(test.prompt) for test in tests)
    must_be = f"at most the model's context = {context}"
    check(longest <= context, "tokens in the longest prompt", longest, must_be)
    room = max(len(test.solution) for test in tests) + 1  # for the end
    order = sorted(range(len(tests)), key=lambda i: len(tests[i].prompt))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    end = tokenizer.number["<end>"]
    generated: dict[int, list[int]] = {}
    for batch in track(
        batches, "ListOps accuracy", console=Console(stderr=True), disable=not progress
    ):
        prompts = [tests[i].prompt for i in batch]
        new = generate(model, prompts, max_new_tokens=room, stop=end, steps=steps, cache=cache)
        generated.update(zip(batch, new, strict=True))
    return score_all(tests, [generated[i] for i in range(len(tests))], tokenizer, room)


def score_all(
    tests: Sequence[TestExpression],
    generated: Sequence[Sequence[int]],
    tokenizer: SymbolTokenizer,
    room: int,
) -> ListOpsResult:
    """Compare what was generated, without the end. ``room`` tokens mean that it did not end."""
    equals = tokenizer.number["="]
    right, exact, examples = [], [], []
    for test, tokens in zip(tests, generated, strict=True):
        last_equals = max((i for i, token in enumerate(tokens) if token == equals), default=-1)
        answer = [tokenizer.number[f" {test.answer}"]]
        right.append(len(tokens) < room and list(tokens[last_equals + 1 :]) == answer)
        exact.append(len(tokens) < room and tuple(tokens) == test.solution)
        prompt, said = render(test.prompt, tokenizer), render(tokens, tokenizer)
        examples.append(Example(prompt, said, test.answer, right[-1]))
    return ListOpsResult(
        correct=sum(right),
        total=len(tests),
        chains=Score(sum(exact), len(tests)),
        per_function=scores_by([test.function for test in tests], right),
        per_depth=scores_by([test.depth for test in tests], right),
        examples=tuple(examples[:SHOWN]),
        mistakes=tuple([example for example in examples if not example.is_correct][:SHOWN]),
    )


def scores_by(groups: Sequence[Group], right: Sequence[bool]) -> dict[Group, Score]:
    totals, correct = Counter(groups), Counter(compress(groups, right))
    return {group: Score(correct[group], totals[group]) for group in sorted(totals)}
