import dataclasses
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from nrgpt.data.listops import (
    FUNCTIONS,
    PAPER,
    RELEASED,
    ListOpsConfig,
    Outcomes,
    describe,
    draw,
    draw_splits,
    render,
    solve,
    to_tokens,
)

SMALL = dataclasses.replace(RELEASED, train=300, validation=20, test=20)
NESTED: dict[str, Any] = {"depth": 4, "min_args": 1, "max_args": 4, "nesting": 0.3}
SIZES: dict[str, Any] = {"numbers": 13, "modulus": 11, "train": 1_000, "validation": 200}
DEEP = ListOpsConfig(functions=tuple(FUNCTIONS), test=200, **NESTED, **SIZES)


def printed(splits, cfg):
    """The expressions of every split as people write them."""
    tokenizer = cfg.tokenizer()
    return {
        split: [render([ord(c) for c in solved], tokenizer) for solved in expressions]
        for split, expressions in splits.items()
    }


def solved_text(written, cfg):
    """From an expression to its whole chain, both as people write them."""
    number = {symbol.strip(): chr(n) for n, symbol in enumerate(cfg.tokenizer().symbols)}
    expression = "".join(number[word] for word in re.findall(r"\w+|[()]", written))
    chain, _ = solve(expression, Outcomes(cfg, np.random.default_rng(0)))
    return render([ord(c) for c in chain], cfg.tokenizer())


# A second evaluator, on the printed text: Python's own for calls, a few lines for Lisp.


def meanings(modulus):
    return {
        "sum": lambda *a: sum(a) % modulus,
        "max": lambda *a: max(a),
        "median": lambda *a: sorted(a)[len(a) // 2],
        "min": lambda *a: min(a),
        "product": lambda *a: int(np.prod(a)) % modulus,
        "first": lambda *a: a[0],
        "last": lambda *a: a[-1],
    }


def lisp_value(text, modulus):
    while match := re.search(r"\((\w+) ([\d ]+)\)", text):
        value = meanings(modulus)[match[1]](*map(int, match[2].split()))
        text = text[: match.start()] + str(value) + text[match.end() :]
    return int(text)


def value_of(text, cfg):
    if cfg.notation == "call":
        return eval(text, {"__builtins__": {}}, meanings(cfg.modulus))
    return lisp_value(text, cfg.modulus)


def plain_calls(text, cfg):
    """The arguments of every call in the text, at any stage, that holds nothing but numbers."""
    pattern = r"\w\(([\d,]+)\)" if cfg.notation == "call" else r"\(\w+ ([\d ]+)\)"
    return {tuple(map(int, re.split("[ ,]", found))) for found in re.findall(pattern, text)}


@pytest.fixture(scope="module")
def released():
    return printed(draw_splits(RELEASED), RELEASED)


def test_the_documented_chain():
    chain = solved_text("sum(max(7,3,6),6,0)", RELEASED)
    assert chain == "sum(max(7,3,6),6,0) = sum(7,6,0) = 3 <end>"


def test_the_innermost_leftmost_call_is_reduced_first():
    written = "sum(max(1,2),median(3,sum(4,5)),6)"
    assert solved_text(written, PAPER) == (
        "sum(max(1,2),median(3,sum(4,5)),6) = sum(2,median(3,sum(4,5)),6)"
        " = sum(2,median(3,9),6) = sum(2,9,6) = 17 <end>"
    )


def test_lisp_and_direct():
    lisp = dataclasses.replace(PAPER, notation="lisp")
    written = "(sum 2 (max 4 13 1))"
    assert solved_text(written, lisp) == "(sum 2 (max 4 13 1)) = (sum 2 13) = 15 <end>"
    direct = dataclasses.replace(lisp, answers="direct")
    assert solved_text(written, direct) == "(sum 2 (max 4 13 1)) = 15 <end>"


def test_functions():
    values = {name: function([7, 5, 9, 4], 10) for name, function in FUNCTIONS.items()}
    first_four = {"sum": 5, "max": 9, "min": 4, "median": 7}  # of 4 5 7 9, the upper middle one
    assert values == first_four | {"product": 0, "first": 7, "last": 4}


@pytest.mark.parametrize("notation", ["call", "lisp"])
@pytest.mark.parametrize("answers", ["steps", "direct"])
def test_every_stage_has_the_value_that_another_evaluator_finds(notation, answers):
    cfg = dataclasses.replace(DEEP, notation=notation, answers=answers)
    splits = printed(draw_splits(cfg), cfg)
    assert [len(splits[split]) for split in ("train", "val", "test")] == [1_000, 200, 200]
    for text in splits["train"] + splits["val"] + splits["test"]:
        chain, end = text.rsplit(" ", 1)
        stages = chain.split(" = ")
        assert end == "<end>"
        assert stages[-1].isdigit()
        assert {value_of(stage, cfg) for stage in stages} == {int(stages[-1])}, text
        calls = [stage.count("(") for stage in stages]
        assert calls == (list(range(calls[0], -1, -1)) if answers == "steps" else [calls[0], 0])


def test_splits_are_disjoint_and_alike(released):
    prompts = [text.split(" = ")[0] for texts in released.values() for text in texts]
    assert len(set(prompts)) == len(prompts) == 54_000
    flat = {split: np.mean([t.count(" = ") == 1 for t in released[split]]) for split in released}
    assert flat["val"] == pytest.approx(flat["train"], abs=0.02)  # short ones in every split


def test_held_out_triples(released):
    seen = {t for split in ("train", "val") for text in released[split] for t in triples(text)}
    # 50,000 expressions meet every triple that they may: all but 5 % of 1,000.
    assert len(seen) == 950
    assert all(triples(text) - seen for text in released["test"])
    # In some, it only appears in the course of the reductions.
    later = [not triples(text.split(" = ")[0]) - seen for text in released["test"]]
    assert 0 < sum(later) < len(later)


def triples(text):
    return {call for call in plain_calls(text, RELEASED) if len(call) == 3}


@pytest.mark.parametrize("notation", ["call", "lisp"])
def test_held_out_tuples_of_deep_expressions(notation):
    cfg = dataclasses.replace(DEEP, notation=notation, max_args=2, held_out=0.2, train=5_000)
    splits = printed(draw_splits(cfg), cfg)

    def pairs(text):
        return {call for call in plain_calls(text, cfg) if len(call) == 2}

    seen = {pair for split in ("train", "val") for text in splits[split] for pair in pairs(text)}
    assert len(seen) == 13**2 - round(0.2 * 13**2)
    assert all(pairs(text) - seen for text in splits["test"])


def test_direct_answers_hold_out_the_reductions_that_they_hide():
    direct = draw_splits(dataclasses.replace(DEEP, answers="direct"))
    steps = draw_splits(DEEP)
    for split in steps:
        assert [describe(e, DEEP).prompt for e in direct[split]] == [
            describe(e, DEEP).prompt for e in steps[split]
        ]


def test_without_held_out_tuples_the_test_is_like_the_training():
    cfg = dataclasses.replace(RELEASED, held_out=0, train=20_000)
    splits = printed(draw_splits(cfg), cfg)
    prompts = [text.split(" = ")[0] for texts in splits.values() for text in texts]
    assert len(set(prompts)) == len(prompts) == 24_000
    assert len({t for text in splits["train"] for t in triples(text)}) == 1_000
    flat = {split: np.mean([t.count("(") == 1 for t in texts]) for split, texts in splits.items()}
    assert flat["test"] == pytest.approx(flat["train"], abs=0.05)


def test_draws_follow_the_config():
    tokenizer = RELEASED.tokenizer()
    drawn = draw(RELEASED, np.random.default_rng(3))
    texts = [render([ord(c) for c in expression], tokenizer) for expression in drawn]
    assert len(texts) == 32_768
    names = Counter(name for text in texts for name in re.findall("[a-z]+", text))
    shares = {name: n / names.total() for name, n in names.items()}
    assert shares == pytest.approx(dict.fromkeys(RELEASED.functions, 1 / 3), abs=0.01)
    inner = r"\w+\([\d,]+\)"
    arguments = [re.sub(inner, "call", text.split("(", 1)[1]).split(",") for text in texts]
    counts = Counter(map(len, arguments))
    assert counts[2] / len(texts) == pytest.approx(0.5, abs=0.01)
    assert counts[2] + counts[3] == len(texts)
    nested = [argument.startswith("call") for row in arguments for argument in row]
    assert np.mean(nested) == pytest.approx(0.25, abs=0.01)
    digits = Counter(d for text in texts for d in re.findall(r"\d", text))
    shares = {digit: n / digits.total() for digit, n in digits.items()}
    assert shares == pytest.approx(dict.fromkeys("0123456789", 0.1), abs=0.005)


def test_the_same_seed_gives_the_same_data_in_any_process():
    program = f"from nrgpt.data.listops import *; print(ascii(draw_splits({SMALL!r})))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert there.strip() == ascii(draw_splits(SMALL))


def test_another_seed_gives_other_data():
    one, two = (draw_splits(dataclasses.replace(SMALL, seed=seed)) for seed in (1, 2))
    for split in one:
        assert len(set(one[split]) & set(two[split])) < len(one[split]) / 2


def test_vocabulary():
    tokenizer = dataclasses.replace(PAPER, functions=("min", "sum")).tokenizer()
    numbers = [f" {n}" for n in range(20)]
    assert tokenizer.symbols == ["<end>", "(", ")", "=", "min", "sum", *numbers]


def test_the_tokenizers_text_round_trips():
    tokenizer = PAPER.tokenizer()
    tokens = to_tokens(draw_splits(dataclasses.replace(PAPER, train=500))["train"]).tolist()
    assert {PAPER.first_number + 1, PAPER.first_number + 13} <= set(tokens)
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens


def test_render_takes_what_a_model_may_say():
    tokenizer = PAPER.tokenizer()
    assert render([], tokenizer) == ""
    assert render([0], tokenizer) == "<end>"
    assert render([4, 8, 9, 999, 2, 3, 0], tokenizer) == "sum,1,2,?) = <end>"


def test_depth_is_the_deepest_nesting():
    depths = Counter(describe(solved, DEEP).depth for solved in draw_splits(DEEP)["test"])
    assert set(depths) == {1, 2, 3, 4}


def test_a_new_function(monkeypatch):
    monkeypatch.setitem(FUNCTIONS, "spread", lambda arguments, modulus: max(arguments) - modulus)
    cfg = dataclasses.replace(PAPER, functions=("spread",), modulus=1, train=10)
    with pytest.raises(ValueError, match=r"spread\(0, 0.*\) = -1: must be in 0 \.\.\. 19"):
        draw_splits(cfg)
    monkeypatch.setitem(
        FUNCTIONS, "spread", lambda arguments, modulus: max(arguments) - min(arguments)
    )
    assert solved_text("spread(spread(3,9),16)", cfg) == (
        "spread(spread(3,9),16) = spread(6,16) = 10 <end>"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"functions": ("sum", "maxx")}, "functions = 'maxx': .* did you mean 'max'"),
        ({"functions": ()}, r"functions = \(\): must be at least one name"),
        ({"functions": ("sum", "sum")}, "functions = .* each only once"),
        ({"functions": "sum"}, "functions = 'sum': must be of type tuple"),
        ({"numbers": 1}, r"numbers = 1: must be in 2 \.\.\. 10,000"),
        ({"modulus": 21}, r"modulus = 21: must be in 1 \.\.\. 20"),
        ({"depth": 0}, "depth = 0"),
        ({"depth": 30, "nesting": 0.9}, "depth = 30: must be less"),
        ({"min_args": 0}, "min_args = 0"),
        ({"max_args": 1}, r"max_args = 1: must be in 2 \.\.\. 100"),
        ({"nesting": 1.5}, r"nesting = 1.5: must be in 0 \.\.\. 1"),
        ({"nesting": float("nan")}, "nesting = nan"),
        ({"notation": "prefix"}, "notation = 'prefix': must be one of 'call', 'lisp'"),
        ({"answers": "step"}, "answers = 'step': .* did you mean 'steps'"),
        ({"train": 0}, "train = 0"),
        ({"test": -1}, "test = -1"),
        ({"held_out": 1.0}, "held_out = 1.0"),
        ({"held_out": 0.1, "max_args": 6}, r"held_out = 0.1: must be 0 where"),
        ({"seed": -1}, "seed = -1"),
        ({"dept": 2}, "no field 'dept'; did you mean 'depth'"),
    ],
)
def test_wrong_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        ListOpsConfig(**fields)


def test_too_few_expressions():
    few = ListOpsConfig(functions=("max",), numbers=4, modulus=4, depth=1, max_args=2, held_out=0.5)
    fits = dataclasses.replace(few, train=6, validation=2, test=8)
    assert list(map(len, draw_splits(fits).values())) == [6, 2, 8]
    with pytest.raises(ValueError, match=r"found only 8 of 9 distinct .* no held-out tuple"):
        draw_splits(dataclasses.replace(fits, train=7))
    with pytest.raises(ValueError, match=r"found only 8 of 9 distinct .* a held-out tuple"):
        draw_splits(dataclasses.replace(fits, test=9))


def test_presets():
    assert (PAPER.numbers, PAPER.modulus, PAPER.functions) == (20, 20, ("sum", "max", "median"))
    assert dataclasses.replace(PAPER, numbers=10, modulus=10) == RELEASED
    shape = (RELEASED.depth, RELEASED.min_args, RELEASED.max_args, RELEASED.nesting)
    assert shape == (2, 2, 3, 0.25)
    assert (RELEASED.train, RELEASED.test, RELEASED.held_out) == (50_000, 2_000, 0.05)
