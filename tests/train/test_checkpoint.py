"""Checkpoints: whole or not there, and never by pickle."""

import json
import resource
import subprocess
import sys

import pytest
import torch

from nrgpt import LanguageModel
from nrgpt.train import checkpoint
from nrgpt.train.checkpoint import CheckpointError
from nrgpt.train.config import OptimiserConfig
from nrgpt.train.optim import make_optimisers, set_rate

from ..models import BLOCKS, config
from ..models import tokens as make_tokens


def trained(block="nrgpt", optimiser="muon", steps=3):
    model = LanguageModel(config(block=block))
    optimisers = make_optimisers(model, OptimiserConfig(name=optimiser), torch.device("cpu"))
    advance(model, optimisers, steps)
    return model, optimisers


def advance(model, optimisers, steps):
    for i in range(steps):
        torch.manual_seed(i)
        idx, targets = make_tokens(model.cfg)
        model.zero_grad()
        model(idx, targets)[1].backward()
        set_rate(optimisers, 0.5)
        for optimiser in optimisers:
            optimiser.step()


def save(folder, step, model, optimisers):
    return checkpoint.save_checkpoint(
        folder,
        step,
        checkpoint.model_tensors(model),
        checkpoint.optimiser_tensors(model, optimisers),
        {"best": {}},
    )


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("block", BLOCKS)
def test_weights_and_optimiser_come_back_bit_for_bit(tmp_path, block, optimiser):
    model, optimisers = trained(block, optimiser)
    path = save(tmp_path, 3, model, optimisers)
    advance(model, optimisers, 4)
    torch.manual_seed(99)
    other, other_optimisers = trained(block, optimiser, steps=1)
    weights, states, state = checkpoint.load_checkpoint(path)
    assert state["step"] == 3
    checkpoint.load_model_tensors(other, weights)
    checkpoint.load_optimiser_tensors(other, other_optimisers, states)
    advance(other, other_optimisers, 4)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", ["model.safetensors", "optimiser.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_damage_is_found_and_the_older_one_used(tmp_path, name, damage):
    model, optimisers = trained()
    save(tmp_path, 1, model, optimisers)
    path = save(tmp_path, 2, model, optimisers) / name
    if damage == "flip":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    assert name in checkpoint.fault_of(path.parent)
    newest, faults = checkpoint.newest_valid(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000001"
    assert len(faults) == 1
    assert name in faults[0]


def test_a_damaged_manifest_is_damage(tmp_path):
    model, optimisers = trained()
    path = save(tmp_path, 2, model, optimisers)
    for text in ("{", "{}", "[]", json.dumps(dict.fromkeys(checkpoint.FILES, 1))):
        (path / "manifest.json").write_text(text)
        assert checkpoint.newest_valid(tmp_path)[0] is None


def test_a_valid_checkpoint_is_never_overwritten_and_a_damaged_one_is(tmp_path):
    model, optimisers = trained()
    path = save(tmp_path, 2, model, optimisers)
    before = (path / "model.safetensors").read_bytes()
    advance(model, optimisers, 1)
    save(tmp_path, 2, model, optimisers)
    assert (path / "model.safetensors").read_bytes() == before
    (path / "model.safetensors").write_bytes(b"damaged")
    save(tmp_path, 2, model, optimisers)
    assert checkpoint.fault_of(path) is None


def test_pruning_keeps_the_last_and_the_best_and_tidying_clears_what_crashes_left(tmp_path):
    model, optimisers = trained()
    for step in range(1, 7):
        save(tmp_path, step, model, optimisers)
    (tmp_path / ".unfinished-00000007-1").mkdir()
    checkpoint.prune(tmp_path, keep=2, needed=(3, None))
    assert checkpoint.tidy(tmp_path) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-0000000{i}" for i in (3, 5, 6)]


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from nrgpt.train import checkpoint
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    checkpoint.save_checkpoint(folder, 2, {"w": torch.zeros(100_000)}, {}, {})
except checkpoint.CheckpointError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("limit", [0, 1_000, 300_000])
def test_a_full_disk_leaves_the_old_and_nothing_of_the_new(tmp_path, limit):
    """A limit on the file size stands in for a full disk: a write fails at some byte."""
    checkpoint.save_checkpoint(tmp_path, 1, {"w": torch.ones(3)}, {}, {})
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "could not write checkpoint" in done.stderr
    assert "free some space" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.fault_of(tmp_path / "step-00000001") is None
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_another_model_is_refused(tmp_path):
    model, _ = trained("nrgpt")
    other, _ = trained("gpt")
    with pytest.raises(CheckpointError, match="another model"):
        checkpoint.load_model_tensors(other, checkpoint.model_tensors(model))


def test_no_pickle_anywhere():
    """No module of the package imports pickle or calls torch.load or torch.save."""
    import ast
    from pathlib import Path

    import nrgpt

    for path in Path(nrgpt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert not {"pickle", "joblib", "dill"} & set(names), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = (node.value.id, node.attr)
                assert called not in {("torch", "load"), ("torch", "save")}, path
