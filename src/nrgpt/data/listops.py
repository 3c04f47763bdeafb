"""ListOps: nested functions of small numbers, and their values.

    sum(max(7,3,6),6,0) = sum(7,6,0) = 3

Tokens, in this order: ``<end>``, ``(``, ``)``, ``=``, the names of the functions (as in the
config), and the numbers from 0, each one token. Commas are only for people.

Reductions. With ``answers="steps"``, one call at a time is replaced by its value until one number
is left: always the call that the first ``)`` closes, the leftmost of the innermost ones.

Held-out tuples. A share ``held_out`` of the ordered tuples of ``max_args`` numbers never occurs as
the arguments of a reduction in a training or validation expression, whatever the function: neither
as written nor after nested calls have become numbers. Every test expression reduces at least one
of them. With ``held_out=0``, the test expressions are merely new.

No expression occurs twice, within a split or across splits. Short ones run out, so they are rarer
than in the draws. One process draws a million in seconds.
"""

import dataclasses
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ..check import check, check_choice, strict
from .shards import write_dataset
from .tokenizer import SymbolTokenizer, Tokenizer

MARKS = ("<end>", "(", ")", "=")
END, OPEN, CLOSE, EQUALS = range(len(MARKS))
FIRST_FUNCTION = len(MARKS)
CALL = -1  # placeholder for a call still to be drawn

TEST_FILE = "test.jsonl"
DRAWS = 32_768
"""Expressions drawn at a time. When fewer than one in a thousand are new, drawing gives up."""
MAX_NUMBERS, MAX_ARGS, MAX_DEPTH, MAX_TUPLES, MAX_MEAN_CALLS = 10_000, 100, 100, 10_000_000, 50

FUNCTIONS: dict[str, Callable[[Sequence[int], int], int]] = {
    "sum": lambda arguments, modulus: sum(arguments) % modulus,
    "max": lambda arguments, modulus: max(arguments),
    "median": lambda arguments, modulus: statistics.median_high(arguments),
    "min": lambda arguments, modulus: min(arguments),
    "product": lambda arguments, modulus: math.prod(arguments) % modulus,
    "first": lambda arguments, modulus: arguments[0],
    "last": lambda arguments, modulus: arguments[-1],
}
"""Functions of (arguments, modulus), by name; add your own. The median of an even number of
arguments is the upper one."""


@strict
class ListOpsConfig:
    """The expressions, and how many of them. The defaults follow the paper's text."""

    functions: tuple[str, ...] = ("sum", "max", "median")
    """Names in FUNCTIONS."""
    numbers: int = 20
    """Numbers are 0 ... numbers - 1."""
    modulus: int = 20
    """For sum and product."""
    depth: int = 2
    """Deepest nesting; 1 is none."""
    min_args: int = 2
    max_args: int = 3
    nesting: float = 0.25
    """Probability that an argument is a call, where depth allows one."""
    notation: Literal["call", "lisp"] = "call"
    """Order of the tokens: sum(2,max(4,13,1)) or (sum 2 (max 4 13 1))."""
    answers: Literal["steps", "direct"] = "steps"
    """Every reduction, or the value alone."""
    train: int = 50_000
    validation: int = 2_000
    test: int = 2_000
    held_out: float = 0.05
    """Share of the tuples of max_args numbers kept for the test; see the top of this module."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.functions:
            check_choice("functions", name, FUNCTIONS)
            check(name.isidentifier(), "functions", name, "letters, digits and _ only")
        are_distinct = len(set(self.functions)) == len(self.functions) > 0
        check(are_distinct, "functions", self.functions, "at least one name, each only once")
        ranges = dict.fromkeys(("train", "validation", "test"), (1, math.inf)) | {
            "numbers": (2, MAX_NUMBERS),
            "modulus": (1, self.numbers),  # so that every value is a number
            "depth": (1, MAX_DEPTH),
            "min_args": (1, MAX_ARGS),
            "max_args": (self.min_args, MAX_ARGS),
            "nesting": (0, 1),
            "held_out": (0, 0.99),
            "seed": (0, math.inf),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            check(least <= value <= most, name, value, f"in {least:,} ... {most:,}")
        calls_in_call = self.nesting * (self.min_args + self.max_args) / 2
        is_small = sum(calls_in_call**level for level in range(self.depth)) <= MAX_MEAN_CALLS
        allowed = f"less, for at most {MAX_MEAN_CALLS} calls in an expression on average"
        check(is_small, "depth", self.depth, allowed)
        is_listable = self.held_out == 0 or self.numbers**self.max_args <= MAX_TUPLES
        allowed = f"0 where numbers ** max_args is above {MAX_TUPLES:,}"
        check(is_listable, "held_out", self.held_out, allowed)

    @property
    def first_number(self) -> int:
        """The token of the number 0."""
        return FIRST_FUNCTION + len(self.functions)

    def tokenizer(self) -> SymbolTokenizer:
        # The space before each number tells 1, 3 from 13 in the tokenizer's text.
        numbers = (f" {number}" for number in range(self.numbers))
        return SymbolTokenizer([*MARKS, *self.functions, *numbers])


PAPER = ListOpsConfig()
"""Functions and numbers as in the paper's text; the rest, which it leaves open, as RELEASED."""
RELEASED = ListOpsConfig(numbers=10, modulus=10)
"""The authors' released data."""


@dataclasses.dataclass(frozen=True)
class TestExpression:
    __test__ = False  # for pytest, which would collect it as a test

    prompt: tuple[int, ...]  # tokens up to and including the first =
    answer: int  # a number, not its token
    solution: tuple[int, ...]  # tokens after the prompt, without <end>
    function: str  # the outermost one
    depth: int


def to_tokens(texts: Iterable[str]) -> np.ndarray:
    """The tokens of strings that have one character per token. Python handles such strings fast."""
    return np.frombuffer("".join(texts).encode("utf-16-le"), dtype="<u2")


def draw(cfg: ListOpsConfig, rng: np.random.Generator) -> Iterator[str]:
    """DRAWS random expressions, all drawn together, one level of nesting after another."""
    tokens = np.full(DRAWS, CALL)
    owner = np.arange(DRAWS)
    name_at, open_at = (0, 1) if cfg.notation == "call" else (1, 0)
    for depth in range(1, cfg.depth + 1):
        is_call = tokens == CALL
        arity = rng.integers(cfg.min_args, cfg.max_args + 1, size=np.count_nonzero(is_call))
        size = np.ones(len(tokens), dtype=int)
        size[is_call] = arity + 3  # the name and two parentheses
        start = (size.cumsum() - size)[is_call]
        tokens, owner = np.repeat(tokens, size), np.repeat(owner, size)
        inside = np.flatnonzero(tokens == CALL)
        tokens[inside] = cfg.first_number + rng.integers(cfg.numbers, size=len(inside))
        if depth < cfg.depth:
            tokens[inside[rng.random(len(inside)) < cfg.nesting]] = CALL
        names = rng.integers(len(cfg.functions), size=len(start))
        tokens[start + name_at] = FIRST_FUNCTION + names
        tokens[start + open_at] = OPEN
        tokens[start + arity + 2] = CLOSE
    text = tokens.astype("<u2").tobytes().decode("utf-16-le")  # the inverse of to_tokens
    ends = np.bincount(owner).cumsum().tolist()
    return (text[start:end] for start, end in itertools.pairwise([0, *ends]))


class Outcomes(dict[str, tuple[str, bool]]):
    """Maps a call on numbers to (its value, whether its arguments are a held-out tuple)."""

    def __init__(self, cfg: ListOpsConfig, rng: np.random.Generator):
        self.cfg = cfg
        self.held_out: np.ndarray | None = None
        if cfg.held_out > 0:
            self.held_out = np.zeros([cfg.numbers] * cfg.max_args, dtype=bool)
            total = self.held_out.size
            count = min(max(1, round(cfg.held_out * total)), total - 1)
            self.held_out.flat[rng.choice(total, count, replace=False)] = True

    def __missing__(self, call: str) -> tuple[str, bool]:
        cfg = self.cfg
        function, *numbers = (ord(c) for c in call if ord(c) >= FIRST_FUNCTION)
        name = cfg.functions[function - FIRST_FUNCTION]
        arguments = tuple(number - cfg.first_number for number in numbers)
        value = FUNCTIONS[name](arguments, cfg.modulus)
        allowed = f"in 0 ... {cfg.numbers - 1}"
        check(value in range(cfg.numbers), f"{name}{arguments}", value, allowed)
        is_full = len(arguments) == cfg.max_args
        is_held_out = self.held_out is not None and is_full and bool(self.held_out[arguments])
        self[call] = chr(cfg.first_number + int(value)), is_held_out
        return self[call]


def solve(expression: str, outcomes: Outcomes) -> tuple[str, bool]:
    """``expression = ... = value <end>``, and whether it reduces a held-out tuple."""
    cfg = outcomes.cfg
    before_open = 1 if cfg.notation == "call" else 0  # the name is before the parenthesis
    stage, stages, met_held_out = expression, [expression], False
    while (close := stage.find(chr(CLOSE))) >= 0:
        start = stage.rfind(chr(OPEN), 0, close) - before_open
        value, is_held_out = outcomes[stage[start : close + 1]]
        stage = stage[:start] + value + stage[close + 1 :]
        stages.append(stage)
        met_held_out |= is_held_out
    if cfg.answers == "direct":
        stages = [stages[0], stages[-1]]
    return chr(EQUALS).join(stages) + chr(END), met_held_out


def draw_splits(cfg: ListOpsConfig) -> dict[str, list[str]]:
    """The solved expressions of "train", "val" and "test". They depend only on the config."""
    rng = np.random.default_rng(cfg.seed)
    outcomes = Outcomes(cfg, rng)
    sizes = {"train": cfg.train, "val": cfg.validation, "test": cfg.test}
    ordinary = sum(sizes.values()) if cfg.held_out == 0 else cfg.train + cfg.validation
    wanted = {
        False: ordinary,
        True: sum(sizes.values()) - ordinary,
    }  # key: reduces a held-out tuple
    found: dict[bool, list[str]] = {False: [], True: []}
    seen, new = set[str](), DRAWS
    while any(len(found[kind]) < wanted[kind] for kind in found):
        if new * 1_000 < DRAWS:
            kind = len(found[False]) == wanted[False]
            raise ValueError(
                f"found only {len(found[kind]):,} of {wanted[kind]:,} distinct expressions that "
                f"reduce {'a' if kind else 'no'} held-out tuple: ask for fewer (train, validation, "
                "test), change held_out, or widen the choice (functions, numbers, max_args, depth)"
            )
        before = sum(map(len, found.values()))
        for expression in draw(cfg, rng):
            if expression not in seen:
                seen.add(expression)
                solved, kind = solve(expression, outcomes)
                if len(found[kind]) < wanted[kind]:
                    found[kind].append(solved)
        new = sum(map(len, found.values())) - before
    # Short expressions come early, so shuffle: every split gets its share of them.
    order = rng.permutation(ordinary).tolist()
    pool = iter([found[False][i] for i in order] + found[True])
    return {split: list(itertools.islice(pool, size)) for split, size in sizes.items()}


def describe(solved: str, cfg: ListOpsConfig) -> TestExpression:
    tokens = tuple(map(ord, solved))
    cut = tokens.index(EQUALS) + 1
    prompt, solution = tokens[:cut], tokens[cut:-1]  # the last is <end>
    outermost = next(token for token in prompt if token >= FIRST_FUNCTION)
    name = cfg.functions[outermost - FIRST_FUNCTION]
    depth = max(itertools.accumulate({OPEN: 1, CLOSE: -1}.get(token, 0) for token in prompt))
    return TestExpression(prompt, solution[-1] - cfg.first_number, solution, name, depth)


def prepare_listops(cfg: ListOpsConfig, folder: Path) -> None:
    """Write the dataset: the splits "train", "val" and "test", and a file of single tests."""
    splits = draw_splits(cfg)
    tests = [dataclasses.asdict(describe(solved, cfg)) for solved in splits["test"]]
    tokens = {split: [to_tokens(expressions)] for split, expressions in splits.items()}
    source = {"listops": {**dataclasses.asdict(cfg), "functions": list(cfg.functions)}}
    extra = {TEST_FILE: "".join(json.dumps(test) + "\n" for test in tests).encode()}
    write_dataset(folder, cfg.tokenizer(), tokens, source=source, extra_files=extra)


def read_tests(folder: Path) -> list[TestExpression]:
    path = folder / TEST_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file; prepare_listops writes it")
    tests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            fields: dict[str, Any] = json.loads(line)
            fields |= {name: tuple(fields[name]) for name in ("prompt", "solution")}
            tests.append(TestExpression(**fields))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not a test expression ({error})") from error
    return tests


def render(tokens: Sequence[int], tokenizer: SymbolTokenizer) -> str:
    """Tokens as people write them. Any tokens will do: a model may produce anything."""
    names = dict(enumerate(tokenizer.symbols))
    words = [names.get(token, "?").strip() for token in tokens]
    pairs = list(itertools.pairwise(words))
    after_open = [right for left, right in pairs if left == "("]
    is_lisp = bool(after_open) and all(word.isidentifier() for word in after_open)

    def gap(left: str, right: str) -> str:
        if {left, right} & {"=", "<end>"}:
            return " "
        if left == "(" or right == ")" or (right == "(" and not is_lisp):
            return ""
        return " " if is_lisp else ","

    return "".join([*words[:1], *(gap(left, right) + right for left, right in pairs)])


class Written(NamedTuple):
    """ListOps' tokenizer, for expressions as people write them."""

    tokenizer: SymbolTokenizer

    def encode(self, text: str) -> list[int]:
        return read_expression(text, self.tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        return render(tokens, self.tokenizer)


def as_written(tokenizer: Tokenizer) -> Tokenizer | Written:
    """A tokenizer for what people write: itself, but for ListOps."""
    is_listops = isinstance(tokenizer, SymbolTokenizer) and "<end>" in tokenizer.number
    return Written(tokenizer) if is_listops else tokenizer  # type: ignore[arg-type]


def read_expression(text: str, tokenizer: SymbolTokenizer) -> list[int]:
    """Tokens of an expression as people write it, such as max(7, min(2,3)) ="""
    words = re.findall(r"<end>|[A-Za-z_]+|\d+|[()=]|[^\s,]", text)
    symbols = [f" {word}" if word.isdecimal() else word for word in words]
    for symbol in symbols:
        if symbol not in tokenizer.number:
            known = " ".join(name.strip() for name in tokenizer.symbols)
            raise ValueError(f"{symbol.strip()!r} in {text!r}: this ListOps knows {known}")
    return [tokenizer.number[symbol] for symbol in symbols]
