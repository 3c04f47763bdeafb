"""Accuracy on ListOps: greedy, over all tests, with intervals, by function and by depth."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.progress import track
from rich.table import Table

from ..data.listops import MARKS, TestExpression, render
from ..data.tokenizer import SymbolTokenizer, Tokenizer
from ..decode.generate import CacheKind, generate
from ..model.network import Network

SHOWN = 3
"""Examples, and mistakes, that a result keeps."""

Z_95 = 1.959964
"""95 % of a normal distribution lie within so many standard deviations."""

Group = TypeVar("Group", str, int)


@dataclass(frozen=True)
class Score:
    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval, which is sound near 0 and 1 and for few tests too."""
        n, p = self.total, self.accuracy
        centre = p + Z_95**2 / (2 * n)
        spread = Z_95 * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n**2))
        scale = 1 + Z_95**2 / n
        # At 0 and n correct, one end is 0 or 1 exactly, up to rounding.
        return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)

    def as_dict(self) -> dict[str, Any]:
        scores = {"correct": self.correct, "total": self.total}
        return scores | {"accuracy": self.accuracy, "interval": list(self.interval)}


@dataclass(frozen=True)
class Example:
    """A test and what the model said, as people write it."""

    prompt: str
    generated: str
    answer: int
    is_correct: bool


@dataclass(frozen=True)
class ListOpsResult:
    answers: Score
    """The final number is right and the model stopped after it."""
    chains: Score
    """Every token of the solution is right. The same as answers where there are no steps."""
    per_function: dict[str, Score]
    """Answers by outermost function."""
    per_depth: dict[int, Score]
    """Answers by depth of nesting."""
    examples: tuple[Example, ...]
    """The first tests, right or wrong."""
    mistakes: tuple[Example, ...]
    """The first wrong answers."""

    @property
    def correct(self) -> int:
        return self.answers.correct

    @property
    def total(self) -> int:
        return self.answers.total

    @property
    def accuracy(self) -> float:
        return self.answers.accuracy

    @property
    def interval(self) -> tuple[float, float]:
        return self.answers.interval

    def as_dict(self) -> dict[str, Any]:
        """What JSON holds."""
        return self.answers.as_dict() | {
            "chains": self.chains.as_dict(),
            "per_function": {name: score.as_dict() for name, score in self.per_function.items()},
            "per_depth": {str(depth): score.as_dict() for depth, score in self.per_depth.items()},
            "examples": [asdict(example) for example in self.examples],
            "mistakes": [asdict(example) for example in self.mistakes],
        }

    def table(self) -> Table:
        table = Table(title="ListOps, greedy, all tests")
        table.add_column("tests")
        for heading in ("correct", "of", "accuracy", "95 % interval"):
            table.add_column(heading, justify="right")
        rows = [("answers", self.answers), ("whole chains", self.chains)]
        rows += [(f"{name}(...)", score) for name, score in self.per_function.items()]
        rows += [(f"depth {depth}", score) for depth, score in self.per_depth.items()]
        for name, score in rows:
            low, high = score.interval
            accuracy = f"{100 * score.accuracy:.2f} %"
            interval = f"{100 * low:.2f} - {100 * high:.2f} %"
            table.add_row(name, f"{score.correct:,}", f"{score.total:,}", accuracy, interval)
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
    """Let the model solve every test, greedily.

    An answer counts if it is the only token after the last ``=`` (the only token, if there is
    none) and the model ends there. The model may take as many tokens as the longest solution.
    ``steps`` are inference steps; None takes the model's own number.
    """
    symbols = check_inputs(model, tests, tokenizer, batch_size)
    room = max(len(test.solution) for test in tests) + 1  # and the end
    order = sorted(range(len(tests)), key=lambda i: len(tests[i].prompt))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    end = symbols.number["<end>"]
    generated: dict[int, list[int]] = {}
    for batch in track(batches, "ListOps accuracy", disable=not progress):
        prompts = [tests[i].prompt for i in batch]
        new = generate(model, prompts, max_new_tokens=room, stop=end, steps=steps, cache=cache)
        generated.update(zip(batch, new, strict=True))
    return score_all(tests, [generated[i] for i in range(len(tests))], symbols, room)


def score_all(
    tests: Sequence[TestExpression],
    generated: Sequence[Sequence[int]],
    tokenizer: SymbolTokenizer,
    room: int,
) -> ListOpsResult:
    """Compare what was generated, less the end; ``room`` tokens mean that it never ended."""
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
        answers=Score(sum(right), len(tests)),
        chains=Score(sum(exact), len(tests)),
        per_function=scores_by(lambda test: test.function, tests, right),
        per_depth=scores_by(lambda test: test.depth, tests, right),
        examples=tuple(examples[:SHOWN]),
        mistakes=tuple([example for example in examples if not example.is_correct][:SHOWN]),
    )


def scores_by(
    group_of: Callable[[TestExpression], Group],
    tests: Sequence[TestExpression],
    right: Sequence[bool],
) -> dict[Group, Score]:
    groups = [group_of(test) for test in tests]
    outcomes = list(zip(groups, right, strict=True))
    return {
        group: Score(outcomes.count((group, True)), groups.count(group))
        for group in sorted(set(groups))
    }


def check_inputs(
    model: Network, tests: Sequence[TestExpression], tokenizer: Tokenizer, batch_size: int
) -> SymbolTokenizer:
    """The tokenizer, once it is known to be ListOps' and everything fits the model."""
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: must be at least 1")
    if not tests:
        raise ValueError("tests is empty; read_tests reads those of a ListOps dataset")
    if not isinstance(tokenizer, SymbolTokenizer) or not set(MARKS) <= set(tokenizer.symbols):
        marks = " ".join(MARKS)
        raise ValueError(f"tokenizer: must be that of a ListOps dataset, which knows {marks}")
    if model.cfg.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the model's vocab_size = {model.cfg.vocab_size}: must be at least the tokenizer's, "
            f"{tokenizer.vocab_size}"
        )
    longest = max(len(test.prompt) for test in tests)
    if longest > model.cfg.context:
        raise ValueError(
            f"the longest prompt has {longest} tokens: must be at most the model's context = "
            f"{model.cfg.context}"
        )
    return tokenizer
