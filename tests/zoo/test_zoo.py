"""The models that come with the package: whole, usable without data, as good as said."""

import doctest
import json

import pytest
import torch
from typer.testing import CliRunner

from nrgpt import trajectory, zoo
from nrgpt.cli import app
from nrgpt.train.checkpoint import newest_valid
from nrgpt.train.runs import load_run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No dataset is there, and what is written must not go into the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NRGPT_DATA", str(tmp_path / "none"))


@pytest.mark.parametrize("name", zoo.names())
def test_whole(name):
    newest, faults = newest_valid(zoo.folder(name) / "checkpoints")
    assert newest is not None
    assert not faults
    run = load_run(zoo.folder(name))
    assert run.model.parameter_counts().total == zoo.about(name)["parameters"]
    assert run.tokenizer.vocab_size == run.model.cfg.vocab_size
    result = json.loads((zoo.folder(name) / "result.json").read_text())
    assert result["step"] == run.step
    size = sum(path.stat().st_size for path in zoo.folder(name).rglob("*"))
    assert size < 1_000_000


def test_a_certified_model_descends():
    run = load_run(zoo.folder("shakespeare_certified"))
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak."
    idx = torch.tensor([run.encode(text)])
    certificate = run.model.double().certificate(idx=idx)
    assert certificate
    assert "no step raises an energy" in str(certificate)
    loss = trajectory(run.model, idx[:, :-1], idx[:, 1:]).loss
    assert loss[-1].mean() < 2  # 4.2 if it had learned nothing; the beginning has little context


def test_a_settled_model_descends_in_its_forward_pass():
    """Single precision, twice the trained steps, all tokens at once; and it still answers."""
    run = load_run(zoo.folder("listops_settled"))
    model = run.model
    assert model.certificate()
    assert "in the forward pass" in str(model.certificate())
    idx = torch.tensor([run.encode("max(4,median(1,5,3),2) = max(4,3,2) = 4")])
    for steps in (5, 10):
        seen = trajectory(model, idx, steps=steps, readouts=False)
        assert (seen.energies["total"].diff(dim=0) < 0).all()
        prompt = run.encode("max(4,median(1,5,3),2) =")
        (answer,) = model.generate([prompt], max_new_tokens=40, stop=0, steps=steps)
        assert run.decode(answer).split("=")[-1].strip().startswith("4")


def test_thirty_steps_solve_an_expression():
    run = load_run(zoo.folder("listops_30_steps"))
    prompt = run.encode("max(4,median(1,5,3),2) =")
    (answer,) = run.model.generate([prompt], max_new_tokens=40, stop=0)
    assert run.decode(answer).split("=")[-1].strip().startswith("4")


def test_the_example():
    assert doctest.testmod(zoo).failed == 0


def test_on_the_command_line(tmp_path):
    runner = CliRunner()
    listed = runner.invoke(app, ["zoo"])
    assert all(name in listed.output for name in zoo.names())
    sampled = runner.invoke(app, ["sample", "zoo:shakespeare_certified", "--prompt", "O"])
    assert sampled.exit_code == 0
    assert len(sampled.output) > 100
    watched = runner.invoke(app, ["trajectory", "zoo:listops_30_steps", "--text", "max(4,2) ="])
    assert watched.exit_code == 0, watched.output
    assert (tmp_path / "out" / "listops_30_steps" / "trajectory" / "index.html").exists()
    wrong = runner.invoke(app, ["sample", "zoo:listops_30_step"])
    assert wrong.exit_code == 2
    assert "listops_30_steps" in wrong.output
