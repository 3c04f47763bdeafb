"""Training: resumed bit for bit, and what a run leaves behind."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from nrgpt.data.shards import write_dataset
from nrgpt.data.tokenizer import GPT2Tokenizer
from nrgpt.files import fingerprint
from nrgpt.train import checkpoint, loop
from nrgpt.train.faults import SIGNALS, TrainingError
from nrgpt.train.runs import read_result
from tests.processes import patience
from tests.runs import debug, final_weights, losses, same, stop_at

FAMILIES = [
    ("model.block=nrgpt", "optimiser.name=adamw"),
    ("model.block=nrgpt", "optimiser.name=muon"),
    ("model.rate=free", "optimiser.name=muon", "optimiser.muon_eta=true"),
    ("model.block=nrgpt", "model.rate=psd_skew_per_step", "model.feedforward=memory"),
    ("model.block=gpt", "optimiser.name=muon"),
    ("model.block=rgpt",),
    ("model.block=rgpt_parallel",),
    ("accumulation=4", "checkpoint_steps=true"),
    ("precision=bf16",),
]


@pytest.mark.parametrize("overrides", FAMILIES, ids=lambda o: "-".join(x.split("=")[1] for x in o))
def test_a_run_split_anywhere_equals_the_uninterrupted_one(tmp_path, overrides, monkeypatch):
    """Bit for bit, dropout included; and its metrics are the same too."""
    cfg = debug(*overrides, "iterations=12", "save_every=100", "eval_every=6", "log_every=1")
    assert cfg.model.dropout > 0
    loop.train(cfg, tmp_path / "whole")
    stop_at(monkeypatch, 5)
    with pytest.raises(TrainingError, match="saved at iteration 5"):
        loop.train(cfg, tmp_path / "split")
    monkeypatch.undo()
    loop.train(cfg, tmp_path / "split")
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "split"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "split")


def test_the_precision_that_fits_a_cpu(tmp_path):
    for precision in ("auto", "fp32", "bf16"):
        loop.train(debug(f"precision={precision}", "iterations=8"), tmp_path / precision)
    auto, fp32, bf16 = (final_weights(tmp_path / name) for name in ("auto", "fp32", "bf16"))
    assert same(auto, fp32)
    assert not same(auto, bf16)


def test_a_failing_start_leaves_no_configuration_behind(tmp_path):
    with pytest.raises(ValueError, match=r"model\.vocab_size = 5"):
        loop.train(debug("model.vocab_size=5"), tmp_path / "run")
    assert loop.train(debug("iterations=6"), tmp_path / "run")["step"] == 6


def test_another_configuration_is_refused_and_bookkeeping_is_not(tmp_path):
    loop.train(debug("iterations=10"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"optimiser\.lr: 0\.003 -> 0\.1"):
        loop.train(debug("optimiser.lr=0.1"), tmp_path / "run")
    assert loop.train(debug("iterations=15", "log_every=5"), tmp_path / "run")["step"] == 15


@pytest.mark.draws
def test_the_run_folder_holds_what_it_should(tmp_path):
    result = loop.train(debug("tensorboard=true"), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"config.json", "environment.json", "metrics.jsonl", "result.json"}
    assert names >= {"losses.png", "checkpoints", "tensorboard", "samples.txt"}
    assert read_result(tmp_path / "run") == result
    assert result["val_loss_full"] < 3
    assert 0 <= result["listops"]["accuracy"] <= 1
    with pytest.raises(ValueError, match=r"nrgpt\[wandb\]"):
        loop.train(debug("wandb=true"), tmp_path / "other")


def test_training_learns():
    """A few hundred iterations bring the loss down by far more than noise."""
    from pathlib import Path

    cfg = debug("iterations=300", "optimiser.name=muon", "eval_every=300", "model.dropout=0")
    loop.train(cfg, Path("run"))
    first, *_, last = [e["loss"] for e in losses(Path("run")) if "loss" in e]
    assert first - last > 0.8


def test_a_dataset_without_its_vocabulary_costs_the_samples_text_and_no_more(
    tmp_path, monkeypatch, capsys
):
    """GPT-2's tokens on a machine that has them, but not what they mean: said at the start."""
    tokens = np.random.default_rng(0).integers(0, 50_257, 400)
    splits = {"train": [tokens], "val": [tokens[:150]]}
    write_dataset(tmp_path / "data", GPT2Tokenizer(), splits, source={"kind": "text"})
    monkeypatch.setenv("NRGPT_GPT2_RANKS", str(tmp_path / "nowhere"))
    fields = ("data.task=text", f"data.folder={tmp_path / 'data'}", "model.vocab_size=50257")
    assert loop.train(debug(*fields, "iterations=6"), tmp_path / "run")["step"] == 6
    said = capsys.readouterr().out
    assert "samples.txt will hold numbers instead of text: NRGPT_GPT2_RANKS" in said
    assert " ⟶ [" in (tmp_path / "run" / "samples.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
def test_every_signal_saves(tmp_path, monkeypatch, number):
    stop_at(monkeypatch, 3, number)
    with pytest.raises(TrainingError, match=f"{number.name}: saved at iteration 3"):
        loop.train(debug("iterations=8"), tmp_path / "run")


def test_a_run_under_nohup_ignores_the_terminals_end(tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop_at(monkeypatch, 3, signal.SIGHUP)
        assert loop.train(debug("iterations=8"), tmp_path / "run")["step"] == 8
    finally:
        signal.signal(signal.SIGHUP, before)


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "fields",
    [("model.vocab_size=5",), ("model.width=1000000",), ("batch=100000000",), ("wandb=true",)],
    ids=str,
)
def test_a_refused_start_leaves_nothing_behind(tmp_path, fields):
    with pytest.raises(ValueError, match=fields[0].split("=")[0].split(".")[-1]):
        loop.train(debug(*fields), tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=fields[0].split("=")[0].split(".")[-1]):
        loop.train(debug(*fields), tmp_path / "empty")
    assert files_of(tmp_path / "empty") == []
    assert loop.train(debug("iterations=6"), tmp_path / "empty")["step"] == 6


@pytest.mark.parametrize("name", ["result.json", "samples.txt", "losses.png", "notes.txt"])
def test_a_folder_that_is_no_run_keeps_its_files(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"is not a run .* is not empty .*{name}"):
        loop.train(debug("iterations=6"), tmp_path)
    assert files_of(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_what_a_killed_process_left_half_written_is_cleared(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(patience())
    (run / f".config.json.{dead.pid}").write_text("{")
    (run / f".notes.{os.getpid()}").write_text("of a process that lives")
    (run / "lock").write_text(str(dead.pid))
    with pytest.raises(ValueError, match="is not empty"):
        loop.train(debug("iterations=6"), run)
    (run / f".notes.{os.getpid()}").unlink()
    loop.train(debug("iterations=6"), run)
    assert not [name for name in files_of(run) if name.startswith(".")]


def test_packed_runs_killed_between_two_saves_go_on_packed(tmp_path, monkeypatch):
    """The first has its new checkpoint and the second has not; each keeps only one."""
    short = ("iterations=12", "save_every=4", "eval_every=4", "keep=1", "model.dropout=0")
    cfgs = [debug(*short, f"seed={seed}") for seed in (0, 1)]
    whole, runs = ([tmp_path / f"{name}-{seed}" for seed in (0, 1)] for name in ("whole", "killed"))
    loop.train_packed(cfgs, whole)
    save, calls = checkpoint.save_checkpoint, []

    def dies(folder, step, *rest):
        calls.append(step)
        if calls.count(8) == 2:
            raise KeyboardInterrupt
        return save(folder, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_checkpoint", dies)
        with pytest.raises(KeyboardInterrupt):
            loop.train_packed(cfgs, runs)
    loop.train_packed(cfgs, runs)
    for a, b in zip(whole, runs, strict=True):
        assert same(final_weights(a), final_weights(b))


def test_packed_runs_without_a_common_checkpoint_go_on_all_the_same(tmp_path):
    short = ("save_every=4", "eval_every=100", "model.dropout=0")
    runs = [tmp_path / f"run-{seed}" for seed in range(3)]
    loop.train_packed([debug(*short, f"seed={s}", "iterations=8") for s in range(3)], runs)
    for path in checkpoint.checkpoints(runs[1] / "checkpoints")[:1]:
        shutil.rmtree(path)
    (runs[1] / "checkpoints" / "step-00000004").rename(runs[1] / "checkpoints" / "step-00000003")
    state = runs[1] / "checkpoints" / "step-00000003" / "state.json"
    state.write_text(state.read_text().replace('"step": 4', '"step": 3', 1))
    manifest = state.with_name("manifest.json")
    entries = json.loads(manifest.read_text()) | {"state.json": fingerprint(state)}
    manifest.write_text(json.dumps(entries))
    results = loop.train_packed(
        [debug(*short, f"seed={s}", "iterations=12") for s in range(3)], runs
    )
    assert [result["step"] for result in results] == [12, 12, 12]
