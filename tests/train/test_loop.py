"""Training: resumed bit for bit, and what a run leaves behind."""

import numpy as np
import pytest

from nrgpt.data.shards import write_dataset
from nrgpt.data.tokenizer import GPT2Tokenizer
from nrgpt.train import loop
from nrgpt.train.faults import TrainingError
from nrgpt.train.runs import read_result
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
