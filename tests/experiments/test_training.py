"""The training that the scripts of experiments share."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from experiments import training
from nrgpt import LanguageModel
from nrgpt.reproduce import records
from nrgpt.train.config import TrainConfig
from nrgpt.train.loop import train as train_run
from nrgpt.train.report import read_metrics
from tests.runs import debug

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def small(**changes) -> TrainConfig:
    cfg = debug("iterations=6", "eval_every=6", "log_every=1", "model.dropout=0", "precision=fp32")
    return dataclasses.replace(cfg, **changes)


def train(cfg, **options):
    torch.manual_seed(cfg.seed)
    model = LanguageModel(cfg.model)
    return training.train(model, cfg, training.batches(cfg, "train", cfg.seed), **options), model


def test_it_is_the_training_of_the_package(tmp_path):
    cfg = small()
    losses, _ = train(cfg)
    train_run(cfg, tmp_path / "run")
    logged = [entry["loss"] for entry in read_metrics(tmp_path / "run") if "loss" in entry]
    assert losses == pytest.approx(logged, rel=1e-4)


def test_what_is_called_after_updates_sees_them():
    seen = []
    losses, model = train(small(random_steps=(1, 2)), after=seen.append)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert len(losses) == 6
    assert losses != train(small())[0]
    batch = training.batches(small(), "val", 7)
    assert training.mean_loss(model, batch, 2) == training.mean_loss(model, batch, 2)


def test_names_are_checked(tmp_path):
    training.check_names(["a"], ["a", "b"])
    with pytest.raises(SystemExit, match="'c': must be one of a, b"):
        training.check_names(["c"], ["a", "b"])
    training.add_row(tmp_path / "rows.jsonl", {"a": 1})
    assert training.read_rows(tmp_path / "rows.jsonl") == [{"a": 1}]


def test_rows_are_what_records_say():
    folder = EXPERIMENTS / "shakespeare_small"
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for row, (name, record) in zip(rows, records.read(folder).items(), strict=True):
        assert row == {"case": name, **training.of_record(record)[1], "packed": 5}
