"""Run folders as a reader finds them."""

import shutil
import threading
from collections import Counter

import pytest

from nrgpt.train import checkpoint, loop
from nrgpt.train.checkpoint import CheckpointError
from nrgpt.train.runs import is_finished, load_run, read_result
from nrgpt.train.verify import accept_changes, verify_run
from tests.processes import patience
from tests.runs import debug, final_weights, run_cli, same


@pytest.fixture
def hashed(monkeypatch):
    """How often each file was hashed, by checkpoint and file."""
    counts, original = Counter(), checkpoint.fingerprint

    def counted(path):
        counts["/".join(path.parts[-2:])] += 1
        return original(path)

    monkeypatch.setattr(checkpoint, "fingerprint", counted)
    return counts


def test_a_checkpoint_is_hashed_once(tmp_path, hashed):
    cfg = debug("iterations=8", "eval_every=4", "save_every=2", "keep=1")
    loop.train(cfg, tmp_path / "run")
    hashed.clear()
    run = load_run(tmp_path / "run")
    newest, best = "step-00000008/model.safetensors", f"step-{run.step:08d}/model.safetensors"
    assert {newest, best} == {name for name in hashed if "model" in name}
    assert set(hashed.values()) == {1}
    hashed.clear()
    loop.train(debug("iterations=8", "keep=1"), tmp_path / "run")  # nothing left to do but read
    assert set(hashed.values()) == {1}


def test_a_damaged_best_is_passed_over_and_a_damaged_step_that_is_asked_for_is_not(tmp_path):
    cfg = debug("iterations=8", "eval_every=100", "save_every=4")
    loop.train(cfg, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    assert same(
        dict(load_run(tmp_path / "run").model.state_dict()), final_weights(tmp_path / "run")
    )
    (folder / "step-00000008" / "model.safetensors").write_bytes(b"damaged")
    run = load_run(tmp_path / "run")
    assert run.step == 4
    assert "step-00000008/model.safetensors" in run.faults[0]
    with pytest.raises(CheckpointError, match="step-00000008/model"):
        load_run(tmp_path / "run", 8)
    with pytest.raises(FileNotFoundError, match=r"step = 5: .* keeps step-00000004, step-00000008"):
        load_run(tmp_path / "run", 5)


def edited(path, change):
    text = path.read_text(encoding="utf-8")
    assert change[0] in text
    path.write_text(text.replace(*change, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", ('"norm_eps": 1e-05', '"norm_eps": 1e-04')),
        ("config.json", ('"steps": 3', '"steps": 2')),
        ("tokenizer.json", ('"sum', '"sam')),
        ("result.json", ('"step": 6', '"step": 7')),
    ],
)
def test_a_changed_file_is_noticed_by_every_reader_until_it_is_accepted(tmp_path, name, change):
    run = tmp_path / "run"
    loop.train(debug("iterations=6", "data.listops.test=5"), run)
    assert all(not faults for _, faults in verify_run(run))
    edited(run / name, change)
    readers = {
        "config.json": [lambda: load_run(run), lambda: loop.train(debug("iterations=6"), run)],
        "tokenizer.json": [lambda: load_run(run).encode("max(1,2)")],
        "result.json": [lambda: is_finished(debug("iterations=6"), run), lambda: read_result(run)],
    }[name]
    for read in readers:
        with pytest.raises(ValueError, match=rf"{name} has changed .*--accept-changes"):
            read()
    assert [n for n, faults in verify_run(run) if faults] == [name]
    assert accept_changes(run) == [name]
    assert all(not faults for _, faults in verify_run(run))
    for read in readers[:1]:
        read()


def test_verify_names_what_is_damaged(tmp_path):
    run = tmp_path / "run"
    loop.train(debug("iterations=6", "save_every=3", "data.listops.test=5"), run)
    (run / "checkpoints" / "step-00000006" / "model.safetensors").write_bytes(b"damaged")
    edited(run / "metrics.jsonl", ("loss", "lass"))
    said = run_cli("verify", str(run), code=2)
    assert "checkpoints/step-00000003: as it was written" in said.stdout
    assert "step-00000006/model.safetensors: 7 bytes where" in said.stdout
    assert "metrics.jsonl: " in said.stdout
    assert "of 6 are not as they were written" in said.stderr
    assert "as it was written" in run_cli("verify", "zoo:listops_30_steps").stdout


def test_a_reader_beside_a_training_finds_a_checkpoint(tmp_path):
    """With keep=1 a checkpoint may vanish between being chosen and being read."""
    run = tmp_path / "run"
    cfg = debug("iterations=6", "save_every=6", "eval_every=100", "keep=1")
    loop.train(cfg, run)
    stop = threading.Event()
    folder = run / "checkpoints"

    def train_on():
        step = 6
        while not stop.is_set():
            shutil.copytree(folder / f"step-{step:08d}", folder / ".unfinished-1")
            (folder / ".unfinished-1").rename(folder / f"step-{step + 1:08d}")
            shutil.rmtree(folder / f"step-{step:08d}")
            step += 1

    trainer = threading.Thread(target=train_on)
    trainer.start()
    try:
        for _ in range(60):
            assert load_run(run).model.cfg == cfg.model
    finally:
        stop.set()
        trainer.join(patience())
