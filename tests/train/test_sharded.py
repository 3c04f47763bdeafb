"""Checkpoints in shares: damage, strangers, links, and readers that come at a bad time."""

import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from nrgpt.train import loop, runs, sharded
from nrgpt.train.checkpoint import CheckpointError, checkpoints, fault_of, newest_valid
from nrgpt.train.runs import load_run, read_steadily

from ..runs import debug, losses, same

EVERY = ("save_every=4", "eval_every=4", "log_every=1", "optimiser.warmup=1", "data.listops.test=4")
SHARED = ("parallel=fsdp", "sharded=true")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("sharded") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NRGPT_DATA", str(tmp_path_factory.getbasetemp() / "data"))
        loop.train(debug("iterations=8", *EVERY, *SHARED), run)
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def newest(run):
    return checkpoints(run / "checkpoints")[0]


def test_shares_of_strangers_are_never_opened(run):
    """torch.distributed.checkpoint reads every file in the folder, and a pickled .metadata if it is
    told to read its own format."""
    strange = newest(run) / "shards" / "shard-00009-model-00001-of-00001.safetensors"
    save_file({"model/tokens": torch.zeros(17, 16)}, strange)
    assert "not in the manifest" in fault_of(newest(run))
    loaded = load_run(run)
    assert loaded.step == 4
    assert str(strange) in loaded.faults[0]
    strange.unlink()
    assert load_run(run).step == 8
    (newest(run) / "shards" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    assert load_run(run).step == 4
    assert not os.path.exists("pwned")


def test_a_whole_checkpoint_has_no_shares(tmp_path):
    run = tmp_path / "run"
    loop.train(debug("iterations=8", *EVERY), run)
    shares = newest(run) / "shards"
    weights = load_run(run).model.state_dict().items()
    weights = {f"model/{name}": torch.zeros_like(weight) for name, weight in weights}
    shares.mkdir()
    save_file(weights, shares / "shard-00001-model-00001-of-00001.safetensors")
    assert load_run(run).step == 4


def test_a_missing_share_is_named(run):
    (share,) = (newest(run) / "shards").iterdir()
    share.unlink()
    assert fault_of(newest(run)) == f"{share}: missing"
    loop.train(debug("iterations=8", *EVERY, *SHARED), run)
    assert newest(run).name == "step-00000008"
    assert newest_valid(run / "checkpoints")[1] == []


def test_no_share_is_written_behind_a_link(run, tmp_path):
    (tmp_path / "theirs").mkdir()
    (run / "checkpoints" / ".unfinished-00000012-shards").symlink_to(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="could not write checkpoint"):
        loop.train(debug("iterations=12", *EVERY, *SHARED), run)
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_reader_takes_another_if_a_share_goes_away(run, monkeypatch):
    """The training removes the checkpoint while it is being read."""
    read, calls = sharded.dcp.load, []

    def load(*arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            shutil.rmtree(newest(run))
        return read(*arguments, **options)

    monkeypatch.setattr(sharded.dcp, "load", load)
    chosen, _, weights = read_steadily(run, None)
    assert chosen.name == "step-00000004"
    assert weights


@pytest.mark.parametrize("more", [(), SHARED], ids=["whole", "shares"])
def test_a_file_that_goes_away_while_it_is_opened(tmp_path, monkeypatch, more, capfd):
    """torch calls it a RuntimeError, and logs a traceback."""
    run = tmp_path / "run"
    loop.train(debug("iterations=8", *EVERY, *more), run)
    capfd.readouterr()
    read, opened = runs.weights_of, []

    def weights_of(folder):
        if opened:
            return read(folder)
        opened.append(folder)
        for path in folder.rglob("*.safetensors"):
            path.unlink()
        try:
            return read(folder)
        finally:
            shutil.rmtree(folder)

    monkeypatch.setattr(runs, "weights_of", weights_of)
    assert load_run(run).step == 4
    assert opened
    assert "Traceback" not in "".join(capfd.readouterr())


def test_errors_of_torch_are_one_line(run, monkeypatch):
    monkeypatch.setattr(sharded.dcp.HuggingFaceStorageReader, "read_data", lambda *_: 1 / 0)
    with pytest.raises(CheckpointError) as said:
        load_run(run, 8)
    assert str(said.value) == f"{newest(run)}: division by zero"


def test_it_goes_on_whole_and_in_shares_again(run, tmp_path):
    """Bit for bit: only how it is written down differs."""
    cfg = [debug("iterations=12", *EVERY, *more) for more in ((), SHARED)]
    loop.train(debug("iterations=12", *EVERY), tmp_path / "alone")
    other = shutil.copytree(run, tmp_path / "other")
    loop.train(cfg[0], run)
    loop.train(cfg[1], other)
    assert same(load_run(run).model.state_dict(), load_run(other).model.state_dict())
    assert losses(run) == losses(other)
