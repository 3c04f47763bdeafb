"""lm-eval gets the same numbers from our models as a plain computation."""

import dataclasses
import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nrgpt.cli import app
from nrgpt.decode.generate import generate
from nrgpt.extras import MissingExtra
from nrgpt.language_model import LanguageModel
from nrgpt.train import loop
from nrgpt.train.overrides import override
from nrgpt.train.presets import PRESETS
from nrgpt.train.runs import load_run

from ..characters import character_run

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.utils import get_rolling_token_windows

from nrgpt.evaluate.harness import HarnessModel, before_stop, options_of
from nrgpt.evaluate.tasks import run_tasks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return character_run(tmp_path_factory.mktemp("characters"))


@pytest.fixture(scope="module")
def listops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("listops")
    cfg = override(PRESETS["debug"](), [f"data.folder={folder / 'data'}", "iterations=40"])
    loop.train(cfg, folder / "run")
    return load_run(folder / "run")


def ask(kind, *arguments):
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def plain(model, tokens, last, steps=None):
    """The log-probability of the last ``last`` tokens, by one pass over one row."""
    logits, _ = model(torch.tensor([tokens[:-1]]), steps=steps)
    chosen = logits[0].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])
    return chosen[-last:].sum().item()


def test_the_entry_point_names_the_model():
    """As lm-eval's versions after 0.4.13 find it: a name, whose module is imported when asked."""
    from lm_eval.api.registry import Registry

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    registry = Registry("model")
    registry.register("nrgpt", target=project["entry-points"]["lm_eval.models"]["nrgpt"])
    assert registry.get("nrgpt") is HarnessModel


PAIRS = [
    ("The sun rises", " in the east."),
    ("A bird", " sings"),
    ("A bird", " singt"),
    ("A bird", " s"),
    ("x", "y"),
    ("The sun rises in the", " west"),
    ("Who can ", "say?"),  # the space becomes part of the continuation
]


@pytest.mark.parametrize(
    "model",
    [
        {"block": "nrgpt"},
        {"coupling": "full", "mask": "released"},
        {"block": "gpt"},
        {"block": "rgpt"},
        {"block": "rgpt_parallel"},
    ],
    ids=lambda model: "-".join(model.values()),
)
@pytest.mark.parametrize("steps", [None, 2])
def test_likelihoods_are_those_of_a_plain_computation(run, model, steps):
    cfg = dataclasses.replace(run.cfg.model, **model)
    other = dataclasses.replace(run, model=LanguageModel(cfg).double().eval())
    for batch_size in (1, 3, 100):
        lm = HarnessModel(other, steps=steps, batch_size=batch_size)
        scores = lm.loglikelihood(ask("loglikelihood", *PAIRS))
        for (context, continuation), (score, _) in zip(PAIRS, scores, strict=True):
            tokens = run.encode(context + continuation)
            last = len(tokens) - len(run.encode(context.rstrip()))
            assert score == pytest.approx(plain(other.model, tokens, last, steps), abs=1e-10)


def test_greedy_continuations_are_recognised(run):
    context = "The sun "
    (new,) = generate(run.model, [run.encode(context.rstrip())], max_new_tokens=5)
    said = run.decode(new)
    other = said[:-1] + ("#" if said[-1] != "#" else "!")
    lm = HarnessModel(run)
    scores = lm.loglikelihood(
        ask("loglikelihood", (context.rstrip(), said), (context.rstrip(), other))
    )
    assert [greedy for _, greedy in scores] == [True, False]


def test_a_long_context_loses_its_beginning_and_a_continuation_nothing(run):
    room = run.model.cfg.context
    text = "The sun rises in the east. " * 5
    continuation = "It sets"
    tokens = run.encode(text.rstrip() + " " + continuation)
    lm = HarnessModel(run)
    pairs = [(text.rstrip(), f" {continuation}"), ("short", " enough")]
    (score, _), _ = lm.loglikelihood(ask("loglikelihood", *pairs))
    kept = tokens[-room - 1 :]
    expected = plain(run.model, kept, len(continuation) + 1)
    assert score == pytest.approx(expected, abs=1e-4)
    assert lm.truncated == 1
    # A continuation may fill the whole context, and no more.
    assert lm.loglikelihood(ask("loglikelihood", ("a", "b" * room)))[0][0] < 0
    with pytest.raises(ValueError, match=rf"continuation of {room + 1} tokens does not fit"):
        lm.loglikelihood(ask("loglikelihood", ("a", "b" * (room + 1))))


def test_rolling_likelihoods_follow_the_harness(run):
    context = run.model.cfg.context
    texts = ["Who can say?", "The sun rises in the east. " * 6, "", "ab" * (context // 2)]
    lm = HarnessModel(run, batch_size=2)
    scores = lm.loglikelihood_rolling(ask("loglikelihood_rolling", *[(text,) for text in texts]))
    newline = run.encode("\n")[0]
    for text, score in zip(texts, scores, strict=True):
        windows = list(get_rolling_token_windows(run.encode(text), newline, context, 1))
        assert sum(len(predicted) for _, predicted in windows) == len(text)
        expected = sum(
            plain(run.model, [*shown, predicted[-1]], len(predicted))
            for shown, predicted in windows
        )
        assert score == pytest.approx(expected, abs=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_export_gives_the_harness_the_same_results(run, tmp_path):
    """With lm-eval's own model for transformers, including long contexts."""
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path / "export"
    result = CliRunner().invoke(app, ["export", str(run.folder), "--to", str(folder)])
    assert result.exit_code == 0, result.output
    theirs = HFLM(
        pretrained=str(folder),
        device="cpu",
        dtype="float32",
        batch_size=2,
        prefix_token_id=run.encode("\n")[0],  # characters have no end of text
    )
    pairs = [*PAIRS, ("", "The sun"), ("The night is long. " * 9, " Who can say?")]
    requests = ask("loglikelihood", *pairs)
    expected = theirs.loglikelihood(requests, disable_tqdm=True)
    for ours, other in zip(HarnessModel(run).loglikelihood(requests), expected, strict=True):
        assert ours[0] == pytest.approx(other[0], abs=1e-4)
        assert ours[1] == other[1]


def test_no_context_no_continuation_unknown_characters(run, listops):
    lm = HarnessModel(run)
    scores = lm.loglikelihood(ask("loglikelihood", ("", "The"), ("The", ""), ("", "")))
    tokens = run.encode("\nThe")
    assert scores[0][0] == pytest.approx(plain(run.model, tokens, 3), abs=1e-4)
    assert scores[1:] == [(0.0, True), (0.0, True)]
    with pytest.raises(ValueError, match="'é' at position 0 is not in this vocabulary"):
        lm.loglikelihood(ask("loglikelihood", ("é", "a")))
    ended = HarnessModel(listops)
    (score, _) = ended.loglikelihood(ask("loglikelihood", ("", "max")))[0]
    assert score == pytest.approx(plain(listops.model, listops.encode("<end> max"), 1), abs=1e-4)


def test_texts_until_a_string(run):
    prompts = ["The sun", "A", "Who can say? The night is long and the tree is in the east"]
    lm = HarnessModel(run, batch_size=2)
    options = {"until": ["\n\n", "zzz"], "max_gen_toks": 60, "do_sample": False}
    said = lm.generate_until(ask("generate_until", *[(prompt, options) for prompt in prompts]))
    new = generate(run.model, [run.encode(prompt) for prompt in prompts], max_new_tokens=60)
    wholes = [run.decode(tokens) for tokens in new]
    assert said == [before_stop(whole, options["until"])[0] for whole in wholes]
    assert lm.truncated == 1
    # Different options in one call: each row stops at its own string.
    stops = [whole[7:9] for whole in wholes]
    requests = [
        (prompt, {"until": stop, "max_gen_toks": 60})
        for prompt, stop in zip(prompts, stops, strict=True)
    ]
    said = lm.generate_until(ask("generate_until", *requests))
    expected = [whole[: whole.find(stop)] for whole, stop in zip(wholes, stops, strict=True)]
    assert said == expected


def test_a_stop_string_may_lie_inside_a_token(listops):
    lm = HarnessModel(listops)
    prompt = "max(1,2"
    options = {"max_gen_toks": 25}
    (whole,) = lm.generate_until(ask("generate_until", (prompt, options)))
    assert "<end>" not in whole  # <end> stops generation and is not part of the text
    (new,) = generate(
        listops.model, [listops.encode(prompt)], max_new_tokens=25, stop=listops.encode("<end>")
    )
    assert whole == listops.decode(new)
    inside = next((word[1] for word in ("max", "min", "median", "sum", "add") if word in whole), "")
    stop = inside or whole[len(whole) // 2]
    (said,) = lm.generate_until(ask("generate_until", (prompt, options | {"until": [stop]})))
    assert said == whole[: whole.find(stop)]


def test_an_empty_prompt_and_sampling(run):
    options = {"do_sample": True, "temperature": 1.0, "top_k": 5, "max_gen_toks": 8}
    said = [
        HarnessModel(run, seed=seed).generate_until(ask("generate_until", ("", options)))[0]
        for seed in (0, 0, 1)
    ]
    assert said[0] == said[1] != said[2]
    assert options_of({"do_sample": False, "temperature": 0.7})[2].temperature == 0
    assert options_of({"max_new_tokens": 3, "num_beams": 1})[1] == 3
    with pytest.raises(ValueError, match=r"options \['num_beams'\]: must be among"):
        options_of({"num_beams": 4})


def test_the_harness_finds_the_model_by_its_name(run, task_folder):
    arguments = f"run={run.folder},steps=2,batch_size=3,device=cpu"
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    found = simple_evaluate(
        "nrgpt", arguments, tasks=["sky"], task_manager=manager, batch_size=1, bootstrap_iters=0
    )
    asked = run_tasks(run, ["sky", "story"], steps=2, include=task_folder)
    assert found["results"]["sky"]["acc,none"] == asked.others["sky"]["metrics"]["acc"]
    assert asked.others["sky"]["stderr"]["acc"] is not None
    assert asked.others["story"]["metrics"]["bits_per_byte"] > 0
    assert asked.truncated == 0
    (table,) = asked.tables()
    assert table.row_count >= 4


@pytest.fixture
def task_folder(tmp_path):
    """A multiple-choice task and a text to read, as task files."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "local.py").write_text(
        "from datasets import Dataset\n"
        "def docs(**_):\n"
        "    rows = [{'text': 'The sun rises in the', 'right': i % 2} for i in range(4)]\n"
        "    return {'test': Dataset.from_list(rows)}\n"
    )
    choice = {
        "task": "sky",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": ["east", "moon"],
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    rolling = {
        "task": "story",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
    }
    for task in (choice, rolling):
        lines = json.dumps(task | {"test_split": "test"})[:-1]
        path = folder / f"{task['task']}.yaml"
        path.write_text(lines + ', "custom_dataset": !function local.docs}')
    return folder


def test_mistakes_are_reported(run, monkeypatch):
    with pytest.raises(ValueError, match="batch_size = 'many'"):
        HarnessModel(run, batch_size="many")
    with pytest.raises(ValueError, match="steps = 0"):
        HarnessModel(run, steps=0)
    with pytest.raises(FileNotFoundError, match="nowhere is not a run"):
        HarnessModel("nowhere")
    with pytest.raises(ValueError, match=r"--tasks mmlu_astrology: must be mmlu, mmlu_paper"):
        run_tasks(run, ["mmlu_astrology"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtra, match=r"pip install 'nrgpt\[eval\]'"):
        run_tasks(run, ["mmlu"])
    result = CliRunner().invoke(app, ["evaluate", str(run.folder), "--no-loss", "--tasks", "mmlu"])
    assert result.exit_code == 2
    assert "nrgpt[eval]" in result.output
