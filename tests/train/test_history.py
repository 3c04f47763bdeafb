"""What a run has logged and kept is never lost, and never silently wrong."""

import json

import pytest

from nrgpt.train import loop
from nrgpt.train.checkpoint import checkpoints
from nrgpt.train.faults import DIVERGED, TrainingError
from nrgpt.train.metrics import Metrics, read, read_metrics
from nrgpt.train.updates import Plain
from tests.runs import debug, losses

STEADY = ("eval_every=20", "save_every=1", "log_every=1", "keep=1", "optimiser.warmup=2")


def not_finite_from(monkeypatch, step):
    gradients = Plain.gradients

    def spoiled(self, batch):
        loss, norm = gradients(self, batch)
        return (loss * float("nan") if batch.step >= step else loss), norm

    monkeypatch.setattr(Plain, "gradients", spoiled)


def test_losses_that_stay_not_finite_cost_no_history_and_leave_a_checkpoint(
    tmp_path, monkeypatch, capsys
):
    cfg, run = debug(*STEADY, "iterations=20", "keep=3"), tmp_path / "run"
    loop.train(cfg, run)
    before, longer = losses(run), debug(*STEADY, "iterations=40", "keep=3")
    kept = len(checkpoints(run / "checkpoints"))
    with monkeypatch.context() as patch:
        not_finite_from(patch, 0)
        with pytest.raises(TrainingError, match="not finite, after 3 retries") as stopped:
            loop.train(longer, run)
    assert stopped.value.code == DIVERGED
    assert len(checkpoints(run / "checkpoints")) == 1
    assert len(list((run / "checkpoints").glob("not-finite-*"))) == kept - 1
    capsys.readouterr()
    loop.train(longer, run)
    said = capsys.readouterr().out
    assert "losses were not finite after not-finite-step-" in said
    assert "resuming from" in said
    whole = losses(run)
    assert whole[: len(before) - 5] == before[: len(before) - 5]
    assert [e["step"] for e in whole] == sorted(e["step"] for e in whole)


def test_a_run_without_a_checkpoint_is_not_begun_anew(tmp_path, capsys):
    run = tmp_path / "run"
    loop.train(debug("iterations=10", "log_every=1"), run)
    history = (run / "metrics.jsonl").read_bytes()
    for path in checkpoints(run / "checkpoints"):
        path.rename(path.with_name(f"not-finite-{path.name}"))
    with pytest.raises(ValueError, match=r"is not begun anew.*set aside, not-finite-step-") as said:
        loop.train(debug("iterations=10", "log_every=1"), run)
    assert "rename it to step-00000010" in str(said.value)
    assert (run / "metrics.jsonl").read_bytes() == history
    (run / "checkpoints" / "not-finite-step-00000010").rename(run / "checkpoints/step-00000010")
    assert loop.train(debug("iterations=12", "log_every=1"), run)["step"] == 12


def test_a_bad_byte_costs_one_line_and_is_named(tmp_path, capsys):
    run = tmp_path / "run"
    loop.train(debug("iterations=20", "log_every=1"), run)
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b"\xff" + lines[2][1:]
    path.write_bytes(b"".join(lines))
    capsys.readouterr()
    loop.train(debug("iterations=22", "log_every=1"), run)
    said = capsys.readouterr().out.replace("\n", "")
    assert "metrics.jsonl: line 3 cannot be read" in said
    assert "lines have changed" in said
    assert path.read_bytes().startswith(b"".join(lines))
    steps = {entry["step"] for entry in read_metrics(run)}
    assert steps == set(range(1, 23)) - {3}


@pytest.mark.parametrize("shortened", [0, 100])
def test_a_shortened_file_is_noticed(tmp_path, capsys, shortened):
    run = tmp_path / "run"
    loop.train(debug("iterations=20", "log_every=1"), run)
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:shortened])
    loop.train(debug("iterations=22", "log_every=1"), run)
    said = capsys.readouterr().out.replace("\n", "")
    assert f"{shortened} bytes where" in said
    assert "lines are missing" in said


def test_a_line_cut_short_by_a_crash_stays_alone(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.add({"step": 1, "loss": 2.0})
    metrics.path.write_bytes(metrics.path.read_bytes() + b'{"step": 2, "lo')
    again = Metrics(tmp_path)
    again.add({"step": 2, "loss": 1.5})
    entries, faults = read(metrics.path)
    assert entries == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]
    assert len(faults) == 1
    assert "line 2" in faults[0]
    assert Metrics(tmp_path).faults(again.keep()) == faults


@pytest.mark.parametrize("line", ["[]", "3", '{"step": true}', '{"loss": 1}', "[" * 100_000])
def test_lines_that_are_no_entries_are_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    entries, faults = read(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == [1, 2]
    assert len(faults) == 1


def test_checkpoints_wait_for_the_metrics_to_be_on_the_disk(tmp_path, monkeypatch):
    from nrgpt.train import checkpoint, metrics

    happened = []
    save = checkpoint.save_checkpoint
    monkeypatch.setattr(metrics, "flush", lambda path: happened.append(path.name))
    monkeypatch.setattr(
        checkpoint, "save_checkpoint", lambda *args: happened.append("saved") or save(*args)
    )
    loop.train(debug("iterations=6", "log_every=1", "save_every=3"), tmp_path / "run")
    assert happened[1:3] == ["metrics.jsonl", "saved"]
    assert (
        json.loads((tmp_path / "run/checkpoints/step-00000006/state.json").read_text())["metrics"][
            "bytes"
        ]
        == (tmp_path / "run" / "metrics.jsonl").stat().st_size
    )
