"""Run folders as a reader finds them."""

from collections import Counter

import pytest

from nrgpt.train import checkpoint, loop
from nrgpt.train.checkpoint import CheckpointError
from nrgpt.train.runs import load_run
from tests.runs import debug, final_weights, same


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
