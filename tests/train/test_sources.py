"""Configuration files, and weights to begin with."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nrgpt.cli import app
from nrgpt.hf import export_run
from nrgpt.train.loop import train
from nrgpt.train.runs import load_run, read_config

from ..runs import debug, final_weights, same

QUICK = ("iterations=4", "optimiser.warmup=1", "eval_every=4", "eval_batches=1", "save_every=4")


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def first(tmp_path):
    train(debug(*QUICK, "final_evaluation=false"), tmp_path / "first")
    return tmp_path / "first"


def test_a_file_is_a_preset_of_ones_own(first):
    Path("mine.toml").write_text(
        'preset = "debug"\niterations = 4\nrandom_steps = [2, 3]\n'
        '[model]\nwidth = 8\nrate_rank = "none"\n[optimiser]\nwarmup = 1\n'
        "[data.listops]\ntest = 5\n"
    )
    run("train", "mine.toml", "seed=3")
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("mine-")
    cfg = read_config(folder / "config.json")
    assert (cfg.model.width, cfg.seed, cfg.random_steps, cfg.data.listops.test) == (8, 3, (2, 3), 5)
    Path("mine.json").write_text(json.dumps({"preset": "debug", "iterations": 4, **WARM}))
    run("train", "mine.json", "--to", "again")
    # The configuration of a run makes the same run once more.
    run("train", first / "config.json", "--to", "copy")
    assert same(final_weights(Path("copy")), final_weights(first))


WARM = {"optimiser": {"warmup": 1}}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("no.toml", None, "no.toml: there is no such file"),
        ("bad.toml", "a = ", "bad.toml: not a configuration"),
        ("bad.json", "[1]", "bad.json: not a configuration (it holds no fields)"),
        (
            "odd.json",
            '{"itterations": 3}',
            "has no field 'itterations'; did you mean 'iterations'?",
        ),
        ("odd.toml", 'preset = "debug"\n[model]\nwitdh = 3', "did you mean 'width'?"),
        ("odd.toml", 'preset = "debugg"', "did you mean 'debug'?"),
        ("odd.toml", "iterations = 0", "odd.toml: iterations = 0: must be at least 1"),
    ],
)
def test_mistakes_in_files_are_named(name, text, said):
    if text is not None:
        Path(name).write_text(text)
    assert said in run("train", name, code=2)


def test_a_training_begins_with_other_weights(first, tmp_path):
    export_run(first, tmp_path / "export")
    began = []
    for number, source in enumerate((first, f"hf:{tmp_path / 'export'}")):
        folder = tmp_path / f"second-{number}"
        run("train", "debug", *QUICK, f"init_from={source}", "optimiser.lr=1e-9", "model.steps=5",
            "model.context=24", "optimiser.weight_decay=0", "--to", folder)  # fmt: skip
        began.append(final_weights(folder))
        wanted = final_weights(first)
        wanted["positions"] = wanted["positions"][:24]
        for name, value in began[-1].items():
            torch.testing.assert_close(value, wanted[name], atol=1e-6, rtol=0)
        assert load_run(folder).model.cfg.steps == 5
    run("train", "debug", *QUICK, "iterations=6", f"init_from={first}", "--to", tmp_path / "long")
    train(debug(*QUICK, "iterations=6", f"init_from={first}"), tmp_path / "long")  # goes on


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["init_from=zoo:listops"], "the zoo has no model 'listops'"),
        (["init_from=zoo:shakespeare_certified"], "its vocabulary has 65 tokens"),
        (["init_from=nowhere"], "nowhere is not a run"),
        (
            ["init_from={first}", "model.width=32"],
            "tokens has shape (17, 16), and this model wants",
        ),
        (["init_from={first}", "model.context=64"], "positions has shape (32, 16)"),
        (["init_from={first}", "model.block=gpt"], "is another kind of model"),
        (["init_from={first}", "data.listops.functions=('min',)"], "vocabulary"),
    ],
)
def test_weights_that_do_not_fit_are_refused(first, words, said):
    words = [word.format(first=first) for word in words]
    assert said in run("train", "debug", *QUICK, *words, "--to", "other", code=2)
