"""device="mps" without an Apple GPU: on a stand-in that refuses what such a GPU refuses."""

import queue
import re

import pytest
import torch
import typer
from typer.testing import CliRunner

import nrgpt
from nrgpt.cli import app, explore
from nrgpt.decode.generate import Sampling
from nrgpt.evaluate.likelihood import likelihoods
from nrgpt.serve.engine import Failed, Group, Job, Way
from nrgpt.train import loop

from ..apple import Apple, apple_gpu, unsupported
from ..runs import debug, final_weights

ZOO = "zoo:listops_30_steps"
FEW = ("iterations=6", "log_every=2", "eval_every=3", "data.listops.test=4")


def test_the_stand_in_refuses_what_an_apple_gpu_refuses():
    with apple_gpu():
        x = torch.ones(3, device="mps")
        assert isinstance(x * 2, Apple)
        assert type(x.cpu()) is torch.Tensor
        with pytest.raises(TypeError, match="float64"):
            x.double()
        with pytest.raises(TypeError, match="float64"):
            torch.zeros(3, dtype=torch.float64, device="mps")
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
    assert unsupported({torch.ops.aten.linalg_eig.default}) == {"linalg_eig"}


# torch.norm, which Muon calls, warns of itself on whatever is neither CPU nor CUDA.
@pytest.mark.filterwarnings("ignore:at..frobenius_norm")
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_training(tmp_path, name):
    """It learns what it learns on a CPU, with what such a GPU has."""
    fields = (*FEW, f"optimiser.name={name}")
    loop.train(debug(*fields, "device=cpu"), tmp_path / "cpu")
    with apple_gpu() as operations:
        loop.train(debug(*fields, "device=mps"), tmp_path / "mps")
    assert not unsupported(operations)
    ours, theirs = (final_weights(tmp_path / kind) for kind in ("cpu", "mps"))
    for weight, value in ours.items():
        torch.testing.assert_close(theirs[weight], value)


def test_a_trained_model():
    wanted = nrgpt.load(ZOO, device="cpu").generate("max(1,2) =", max_new_tokens=4)
    with apple_gpu() as operations:
        model = nrgpt.load(ZOO, device="mps")
        assert isinstance(model.model.tokens, Apple)
        assert model.generate("max(1,2) =", max_new_tokens=4) == wanted
        model.generate("max(1,2) =", max_new_tokens=4, temperature=1.0, top_k=4, top_p=0.9)
        model.energies("max(1,2) =")
        model.attention("max(1,2) =")
        repr(model.trajectory("max(1,2) ="))
        likelihoods(model.model, [([1, 2], [3])], steps=None, batch_size=2)
        events: queue.Queue = queue.Queue()
        group = Group(model.model, Way(3, energies=True))
        job = Job([1, 2], 3, group.way, Sampling(temperature=1.0), events.put, logprobs=2)
        group.arriving.append(job)
        while not job.is_over:
            with torch.no_grad():
                group.step()
        assert not any(isinstance(event, Failed) for event in events.queue)
    assert not unsupported(operations)


@pytest.mark.parametrize(
    "words",
    [
        ["certificate", "--texts", "1"],
        ["convergence", "--texts", "1", "--steps", "3"],
        ["landscape", "--to", "out"],
    ],
)
def test_what_needs_float64_is_computed_on_the_cpu_and_says_so(words, monkeypatch):
    def survey(model, *arguments, **options):
        assert model.tokens.dtype is torch.float64
        raise typer.Exit(0)  # the rest takes long, and is as on any CPU

    monkeypatch.setattr(explore, "survey", survey)
    with apple_gpu():
        done = CliRunner().invoke(app, [words[0], ZOO, *words[1:], "--device", "mps"])
    assert done.exit_code == 0, done.output
    said = re.sub(r"\s+", " ", done.output)
    assert "device = 'mps' has no float64: this is computed on the CPU" in said


def test_the_page_of_a_trajectory():
    with apple_gpu():
        options = ["--text", "max(1", "--steps", "3", "--to", "out", "--device", "mps"]
        done = CliRunner().invoke(app, ["trajectory", ZOO, *options])
    assert done.exit_code == 0, done.output
