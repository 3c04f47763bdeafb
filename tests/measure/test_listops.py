import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from nrgpt import LanguageModel, ModelConfig
from nrgpt.check import from_dict
from nrgpt.data.listops import (
    END,
    EQUALS,
    RELEASED,
    TEST_FILE,
    ListOpsConfig,
    describe,
    draw_splits,
    prepare_listops,
    read_tests,
    render,
    to_tokens,
)
from nrgpt.data.shards import Dataset
from nrgpt.data.tokenizer import GPT2Tokenizer, SymbolTokenizer
from nrgpt.measure.listops import Score, listops_accuracy
from tests.cases import NEEDS_GPU

CFG = dataclasses.replace(RELEASED, train=50, validation=10, test=40)
TOKENIZER = CFG.tokenizer()
SOLVED = draw_splits(CFG)["test"]
TESTS = [describe(solved, CFG) for solved in SOLVED]


def model_config(**fields):
    sizes = {"vocab_size": TOKENIZER.vocab_size, "context": 80, "width": 16, "heads": 2}
    return ModelConfig(**{**sizes, "steps": 2, **fields})


class Scripted(LanguageModel):
    """Continues each prompt with ``says[prompt]``, and then with END forever."""

    def __init__(self, says):
        super().__init__(model_config())
        self.says = says

    def forward(self, idx, targets=None, *, steps=None, extra=None, **options):
        logits = torch.zeros(*idx.shape, self.cfg.vocab_size)
        for row, text in zip(logits, idx.tolist(), strict=True):
            prompt = tuple(text[: text.index(EQUALS) + 1])
            script = [*prompt, *self.says[prompt]]
            for at, scores in enumerate(row):
                scores[script[at + 1] if at + 1 < len(script) else END] = 1
        return logits, None


def accuracy_of(change, **options):
    """The accuracy of a model whose solution is ``change(test)``."""
    says = {test.prompt: change(test) for test in TESTS}
    return listops_accuracy(Scripted(says), TESTS, TOKENIZER, cache="none", **options)


def number(value):
    return TOKENIZER.number[f" {value % 10}"]


@pytest.mark.parametrize("batch_size", [1, 7, 256])
def test_a_model_that_is_always_right(batch_size):
    result = accuracy_of(lambda test: test.solution, batch_size=batch_size)
    assert (result.correct, result.total, result.accuracy) == (40, 40, 1.0)
    assert result.chains == Score(40, 40)
    assert sum(score.total for score in result.per_function.values()) == 40
    assert set(result.per_depth) == {1, 2}
    assert result.mistakes == ()
    prompts = [render(test.prompt, TOKENIZER) for test in TESTS[:3]]
    assert [example.prompt for example in result.examples] == prompts
    texts = [render([ord(c) for c in solved[:-1]], TOKENIZER) for solved in SOLVED[:3]]
    assert [f"{e.prompt} {e.generated}" for e in result.examples] == texts


def test_wrong_answers_are_counted_where_they_belong():
    def wrong_when_flat(test):
        return test.solution if test.depth == 2 else (number(test.answer + 1),)

    result = accuracy_of(wrong_when_flat, batch_size=7)
    flat = [test for test in TESTS if test.depth == 1]
    deep = [test for test in TESTS if test.depth == 2]
    assert result.per_depth == {1: Score(0, len(flat)), 2: Score(len(deep), len(deep))}
    assert result.answers == result.chains == Score(len(deep), 40)
    for name, score in result.per_function.items():
        assert score.correct == sum(test.function == name for test in deep)
        assert score.total == sum(test.function == name for test in TESTS)
    wrong = [render(test.prompt, TOKENIZER) for test in flat[:3]]
    assert [example.prompt for example in result.mistakes] == wrong
    assert not any(example.is_correct for example in result.mistakes)
    assert result.mistakes[0].generated == str((flat[0].answer + 1) % 10)
    assert result.mistakes[0].answer == flat[0].answer


def test_a_right_answer_after_a_wrong_or_missing_step():
    direct = accuracy_of(lambda test: (number(test.answer),))
    assert direct.answers == Score(40, 40)
    assert direct.chains == Score(sum(len(test.solution) == 1 for test in TESTS), 40)
    detour = accuracy_of(lambda test: (number(test.answer + 1), EQUALS, number(test.answer)))
    assert detour.answers == Score(40, 40)
    assert detour.chains == Score(0, 40)


@pytest.mark.parametrize(
    "change",
    [
        lambda test: (),
        lambda test: (*test.solution, EQUALS),
        lambda test: (*test.solution, number(test.answer)),
        lambda test: (*test.solution, EQUALS, number(test.answer + 1)),
        lambda test: (EQUALS, number(test.answer)) * 100,  # never stops
    ],
)
def test_what_does_not_count(change):
    result = accuracy_of(change)
    assert result.answers == result.chains == Score(0, 40)


def test_the_longest_solution_has_just_enough_room():
    longest = max(TESTS, key=lambda test: len(test.solution))
    model = Scripted({longest.prompt: longest.solution})
    assert listops_accuracy(model, [longest], TOKENIZER, cache="none").chains == Score(1, 1)
    model = Scripted({longest.prompt: (*longest.solution[:-1], EQUALS, longest.solution[-1])})
    assert listops_accuracy(model, [longest], TOKENIZER, cache="none").answers == Score(0, 1)


@pytest.mark.parametrize("block", ["nrgpt", "gpt", "rgpt", "rgpt_parallel"])
def test_batches_do_not_change_what_a_model_says(block):
    model = LanguageModel(model_config(block=block, vocab_size=30, init_std=0.5)).double()
    one, many = (listops_accuracy(model, TESTS, TOKENIZER, batch_size=n) for n in (3, 256))
    assert one == many
    assert "?" in "".join(example.generated for example in one.mistakes)  # beyond the vocabulary
    fewer = listops_accuracy(model, TESTS, TOKENIZER, steps=1)
    assert fewer.mistakes != many.mistakes


def test_a_model_that_learned_the_tests():
    model = LanguageModel(model_config(block="rgpt", width=32))
    tests = [test for test in TESTS if len(test.prompt) == 7]  # rows of one length
    rows = torch.tensor([[*test.prompt, *test.solution, END] for test in tests])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        _, loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    result = listops_accuracy(model, tests, TOKENIZER)
    assert result.chains == Score(len(tests), len(tests))
    assert result.total >= 3
    assert model.training  # unchanged


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_GPU)
def test_on_the_models_own_device():
    model = LanguageModel(model_config(init_std=0.5)).double()
    here = listops_accuracy(model, TESTS, TOKENIZER)
    assert listops_accuracy(model.cuda(), TESTS, TOKENIZER) == here


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [(8, 10, 0.4901625, 0.9433178), (0, 10, 0, 0.2775328), (10, 10, 0.7224672, 1)],
)
def test_wilson_interval(correct, total, low, high):
    """The values of R's prop.test(correct=FALSE)."""
    assert Score(correct, total).interval == pytest.approx((low, high), abs=1e-6)


def test_for_json_and_for_the_screen():
    result = accuracy_of(lambda test: (number(test.answer),))
    fields = json.loads(json.dumps(result.as_dict()))
    assert fields["accuracy"] == 1
    assert fields["interval"] == list(result.interval)
    assert fields["per_depth"]["2"]["total"] == result.per_depth[2].total
    assert fields["chains"]["correct"] == result.chains.correct
    assert fields["examples"][0]["answer"] == TESTS[0].answer
    screen = io.StringIO()
    Console(width=80, file=screen).print(result.table())
    for words in ("100.00 %", "whole chains", "median(...)", "depth 2", "95 % interval"):
        assert words in screen.getvalue()


@pytest.mark.parametrize(
    ("model", "tests", "tokenizer", "options", "message"),
    [
        ({}, [], TOKENIZER, {}, "tests is empty"),
        ({}, TESTS, TOKENIZER, {"batch_size": 0}, "batch_size = 0: must be at least 1"),
        ({}, TESTS, SymbolTokenizer(["a", "b"]), {}, "must be that of a ListOps dataset"),
        ({}, TESTS, GPT2Tokenizer(), {}, "must be that of a ListOps dataset"),
        ({"vocab_size": 16}, TESTS, TOKENIZER, {}, "vocab_size = 16: .* tokenizer's, 17"),
        ({"context": 7}, TESTS, TOKENIZER, {}, "tokens in the longest prompt = .* context = 7"),
        ({}, TESTS, TOKENIZER, {"steps": 0}, "steps = 0: must be"),
    ],
)
def test_errors(model, tests, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        listops_accuracy(LanguageModel(model_config(**model)), tests, tokenizer, **options)


def test_a_prompt_that_just_fits_the_context():
    longest = max(len(test.prompt) for test in TESTS)
    model = LanguageModel(model_config(context=longest))
    assert listops_accuracy(model, TESTS, TOKENIZER).total == 40


def test_prepared_folder(tmp_path):
    folder = tmp_path / "listops"
    prepare_listops(CFG, folder)
    dataset = Dataset.open(folder)
    assert dataset.tokenizer.spec() == TOKENIZER.spec()
    for split, expressions in draw_splits(CFG).items():
        tokens = dataset.tokens(split)
        assert (tokens.read(0, len(tokens)) == to_tokens(expressions)).all()
    assert from_dict(ListOpsConfig, dataset.manifest["source"]["listops"]) == CFG
    tests = read_tests(folder)
    assert tests == TESTS
    for test, solved in zip(tests, SOLVED, strict=True):
        text = render([ord(c) for c in solved], TOKENIZER)
        assert render([*test.prompt, *test.solution, END], TOKENIZER) == text
        assert text.startswith(f"{test.function}(")
        assert text.endswith(f"= {test.answer} <end>")
        assert test.depth == 1 + (text.split(" = ")[0].count("(") > 1)


def test_unreadable_tests(tmp_path):
    with pytest.raises(FileNotFoundError, match="prepare_listops writes it"):
        read_tests(tmp_path)
    good = json.dumps(dataclasses.asdict(TESTS[0]))
    for bad in ("{", "{}", "[]", good.replace("answer", "answers")):
        (tmp_path / TEST_FILE).write_text(f"{good}\n{bad}\n")
        with pytest.raises(ValueError, match=r"test\.jsonl, line 2: not a test expression"):
            read_tests(tmp_path)
