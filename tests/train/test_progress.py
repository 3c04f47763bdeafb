"""What somebody sees who waits."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nrgpt.cli import app
from nrgpt.cli.fields import described
from nrgpt.model.flops import flops_per_token
from nrgpt.train import estimate
from nrgpt.train.estimate import duration, estimated_seconds
from nrgpt.train.presets import PRESETS

from ..processes import patience
from ..runs import debug
from ..terminal import in_terminal


def run(*words):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


SHORT = ["debug", "iterations=40", "log_every=5"]


def test_the_bar_shows_iteration_time_and_loss_at_80_columns(monkeypatch):
    monkeypatch.setenv("NRGPT_DATA", "fresh")
    seen = in_terminal("train", *SHORT, "--to", "run")
    assert seen.code == 0, seen.text
    assert "preparing the data in fresh/listops-" in seen.text  # outside of --to
    lines = [line for line in re.split(r"[\r\n]+", seen.text) if "/40" in line]
    shown = {int(re.search(r"(\d+)/40", line)[1]) for line in lines}
    assert shown
    assert all(len(line.rstrip()) <= 80 for line in lines)
    last = lines[-1]
    assert re.search(r"40/40 +\d+:\d\d +loss \d\.\d+ +val \d\.\d+", last), last
    assert "loss" in seen.text.split("evaluating run")[1]  # that bar too
    after = seen.text.split("iterations")[-1]
    assert len(after.splitlines()) < 15
    assert "validation loss" in after


def test_ctrl_c_answers_at_once_and_the_same_command_goes_on():
    slow = ["debug", "iterations=100000", "model.width=64", "log_every=5", "--to", "run"]
    seen = in_terminal("train", *slow, ctrl_c_after=r"loss \d", answer="saving ...")
    assert seen.code == 75, seen.text
    assert 0 <= seen.answered < patience() / 30
    assert "run the same command to resume" in seen.text
    assert list(Path("run/checkpoints").glob("step-*"))


def test_without_a_final_evaluation():
    said = run("train", *SHORT, "final_evaluation=false", "--to", "run")
    result = json.loads(Path("run/result.json").read_text())
    assert result["step"] == 40
    assert "val_loss_full" not in result
    assert "listops" not in result
    assert not Path("run/samples.txt").exists()
    assert "validation loss" not in said
    run("train", *SHORT, "--to", "run")  # the evaluation can be had later
    assert "val_loss_full" in json.loads(Path("run/result.json").read_text())


def test_presets_fit_into_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed = run("presets")
    assert all(len(line) <= 80 for line in listed.splitlines())
    for name in PRESETS:
        base = re.sub("_(paper|released)$", "", name)
        assert re.search(rf"^({name}|{base}) ", listed, re.M), name
    one = run("presets", "debug")
    assert '"iterations": 60' in one
    assert "a whole run in seconds" in one


def test_every_field_is_explained():
    rows = described()
    assert len(rows) > 80
    assert not [name for name, _, _, text in rows if not text.strip()]


def test_estimates_are_of_the_right_size(monkeypatch):
    """Twice the work takes about twice as long; large models are not made to be timed."""
    assert [duration(s) for s in (0.2, 59, 600, 5_400, 200_000)] == [
        "1 seconds", "59 seconds", "10 minutes", "2 hours", "2 days",
    ]  # fmt: skip
    assert estimated_seconds(debug()) > 0
    timed = []

    def update_seconds(model, rows, length):
        """Of a machine with 1e10 FLOPs per second."""
        timed.append(model.cfg)
        return rows * length * flops_per_token(model.cfg) / 1e10

    monkeypatch.setattr(estimate, "update_seconds", update_seconds)
    few, many = (estimated_seconds(debug(f"iterations={n}")) for n in (1_000, 100_000))
    assert many / few == pytest.approx(100)
    assert estimated_seconds(PRESETS["owt_nrgpt_ff2w"]()) > 24 * 3_600
    assert timed[-1].width < PRESETS["owt_nrgpt_ff2w"]().model.width


@pytest.mark.parametrize("words", [["fields"], ["fields", "optimiser"], ["fields", "model.rate"]])
def test_fields_on_the_command_line(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = run(*words)
    assert words[-1] in said or words == ["fields"]
    assert all(len(line) <= 80 for line in said.splitlines())
