"""A trained model used with text, from a run, the zoo or an export."""

import socket

import pytest
import torch
from typer.testing import CliRunner

import nrgpt
from nrgpt import zoo
from nrgpt.cli import app
from nrgpt.data.tokenizer import SymbolTokenizer
from nrgpt.dynamics.landscape import TokenLandscape
from nrgpt.hf import export_run
from nrgpt.train.loop import train
from nrgpt.train.runs import load_run

from .models import config, randomised, tokens
from .runs import debug

SHAKESPEARE = "zoo:shakespeare_certified"


@pytest.fixture(scope="module")
def model():
    return nrgpt.load(SHAKESPEARE, device="cpu")


def test_text_in_and_text_out(model):
    one = model.generate("ROMEO:", max_new_tokens=30, temperature=0)
    assert len(one) == 30
    run = load_run(SHAKESPEARE)
    (same,) = run.model.generate([run.encode("ROMEO:")], max_new_tokens=30)
    assert one == run.decode(same)
    several = model.generate(["ROMEO:", "O"], max_new_tokens=30, temperature=0)
    assert several[0] == one
    assert "".join(model.stream("ROMEO:", max_new_tokens=30, temperature=0)) == one
    assert len(model.generate("", max_new_tokens=5)) == 5
    assert model.generate("O", max_new_tokens=9, seed=1) == model.generate(
        "O", max_new_tokens=9, seed=1
    )
    with pytest.raises(ValueError, match="'é' at position 2"):
        model.generate("caé")


def test_energies_are_those_of_the_trajectory(model):
    found, seen = model.energies("ROMEO:", steps=5), model.trajectory("ROMEO:", steps=5)
    assert found.keys() == seen.energies.keys()
    for name, energy in found.items():
        torch.testing.assert_close(energy, seen.energies[name][-1, 0])
    assert model.pieces("ROM") == ["R", "O", "M"]
    assert seen.loss[-1, 0, :-1].isfinite().all()


def test_reprs_are_short(model):
    seen = model.trajectory("ROMEO:")
    land = TokenLandscape(model.model, seen.idx, 2)
    things = (model, model.model, seen, load_run(SHAKESPEARE), model.model.cfg, land, land.surface)
    for thing in (*things, model.model.certificate()):
        assert len(repr(thing)) < 200, repr(thing)
        assert " object at " not in repr(thing)
    cfg = nrgpt.ModelConfig(width=64, heads=2)
    assert repr(cfg) == "ModelConfig(width=64, heads=2)"
    assert eval(repr(cfg), {"ModelConfig": nrgpt.ModelConfig}) == cfg


def test_a_settled_past_and_a_prelude():
    """Its energies and weights are had like any other's."""
    model = randomised(config(past="settled", prelude=1))
    weights = model.attention(tokens(model.cfg)[0])
    assert weights.shape == (3, 2, 3, 7, 7)
    assert torch.allclose(weights[..., 1:, :].sum(-1), torch.ones(1).double())
    alphabet = SymbolTokenizer("abcdefghijk")
    text = nrgpt.TextModel("x", model, alphabet, alphabet)
    seen = text.trajectory("abcab")
    for name, energy in text.energies("abcab").items():
        torch.testing.assert_close(energy, seen.energies[name][-1, 0])


@pytest.mark.parametrize("mask", ["strict", "inclusive"])
@pytest.mark.parametrize("block", ["nrgpt", "gpt", "rgpt", "rgpt_parallel"])
def test_attention_weights_explain_the_force(block, mask):
    """Weighted keys are what attention returns, in every step."""
    if block != "nrgpt" and mask != "strict":
        pytest.skip("only energies have masks")
    own = {"mask": mask} if block == "nrgpt" else {}
    model = randomised(config(block=block, **own))
    idx, _ = tokens(model.cfg)
    weights = model.attention(idx)
    assert weights.shape == (3, 2, 3, 7, 7)
    assert torch.equal(weights, weights.tril(-1 if own.get("mask") == "strict" else 0))
    sums = weights.sum(-1)
    blind = own.get("mask") == "strict"
    assert torch.allclose(sums[..., 1:], torch.ones_like(sums[..., 1:]))
    assert torch.allclose(sums[..., 0], torch.full_like(sums[..., 0], 0.0 if blind else 1.0))
    if block == "nrgpt":
        term = model.energy_block.terms["attention"]
        plan = model.energy_block.plan()
        g = plan.normalise(model.embed(idx))
        z = term.readout().z(g)
        keys = term.keys(z, g)
        force = term.merge(weights[0] @ keys)
        size = force.shape[-1]
        found = term.force(z, plan.past(0, z, g, 0, None))[..., :size]
        torch.testing.assert_close(force, found)


def test_a_run_and_its_export_are_the_same_model(tmp_path):
    train(debug("iterations=4", "optimiser.warmup=1"), tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "export")
    run, export = nrgpt.load(tmp_path / "run"), nrgpt.load(tmp_path / "export")
    assert "gpt" not in repr(run)[: repr(run).index(",")]
    text = "max(1,2) ="
    assert run.encode(text) == export.encode(text)
    for name, energy in run.energies(text).items():
        assert torch.equal(energy, export.energies(text)[name])
    assert run.generate(text, max_new_tokens=9) == export.generate(text, max_new_tokens=9)
    with pytest.raises(ValueError, match="an export holds a single one"):
        nrgpt.load(tmp_path / "export", checkpoint=3)


def test_a_wrong_name_says_what_there_is():
    with pytest.raises(FileNotFoundError, match="neither a run folder nor an export"):
        nrgpt.load("nowhere")
    with pytest.raises(ValueError, match="did you mean 'listops_30_steps'"):
        nrgpt.load("zoo:listops_30_step")


@pytest.mark.parametrize("name", zoo.names())
def test_the_zoo_needs_neither_a_network_nor_a_dataset(name, tmp_path, monkeypatch):
    """Everything that looks at the beginning of the validation split."""
    monkeypatch.setenv("NRGPT_DATA", str(tmp_path / "none"))
    monkeypatch.delenv("NRGPT_SHAKESPEARE", raising=False)

    def no_network(*arguments):
        raise AssertionError("it asked the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    proof = [["certificate", "--texts", "2"]] if "rgpt" not in name else []
    for words in (*proof, ["trajectory", "--to", "seen", "--steps", "2"]):
        result = CliRunner().invoke(app, [words[0], f"zoo:{name}", *words[1:]])
        assert result.exit_code == 0, result.output
    assert not (tmp_path / "none").exists()
    assert nrgpt.load(f"zoo:{name}").generate("", max_new_tokens=3)
