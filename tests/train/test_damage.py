"""A run folder that was damaged, or made by somebody else: said in a line, and nothing hangs."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from nrgpt.cli import app
from nrgpt.data.shards import Dataset
from nrgpt.files import NotOurs, fingerprint, read_sealed, sealed
from nrgpt.train import loop
from nrgpt.train.checkpoint import CheckpointError, checkpoints
from nrgpt.train.data import RANKS, keep_tokenizer
from nrgpt.train.runs import load_run
from nrgpt.train.verify import accept_changes, verify_run
from tests.runs import debug

EVERY = ("save_every=4", "eval_every=4", "optimiser.warmup=1", "data.listops.test=4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("damage") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NRGPT_DATA", str(tmp_path_factory.getbasetemp() / "data"))
        loop.train(debug("iterations=8", *EVERY), run)
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def vouched(path):
    """The manifest of a checkpoint as if this file had been written so."""
    manifest = path.with_name("manifest.json")
    entries = json.loads(manifest.read_text()) | {path.name: fingerprint(path)}
    manifest.write_text(json.dumps(entries))


def with_state(run, **changes):
    for checkpoint in checkpoints(run / "checkpoints"):
        path = checkpoint / "state.json"
        state = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in state.items() if v != "gone"}))
        vouched(path)


@pytest.mark.parametrize(
    "changes",
    [{"best": "gone"}, {"best": [1]}, {"best": {"step": "../../x"}}, {"step": None}, {"step": -1},
     {"best": {"step": 10**30}}, {"rollbacks": "x"}, {"metrics": 3}, {"rate_factor": 1}],
)  # fmt: skip
def test_a_state_that_is_none(run, changes):
    with_state(run, **changes)
    for use in (load_run, lambda run: loop.train(debug("iterations=12", *EVERY), run)):
        with pytest.raises(CheckpointError, match=r"state\.json: not the state of a training"):
            use(run)


@pytest.mark.parametrize("missing", ["rollbacks", "rate_factor"])
def test_a_state_with_which_no_training_can_go_on(run, missing):
    with_state(run, **{missing: "gone"})
    load_run(run)
    with pytest.raises(CheckpointError, match=f"its state has no {missing}"):
        loop.train(debug("iterations=12", *EVERY), run)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"width": 32}, r"tokens has shape \(17, 16\) instead of \(17, 32\)"),
        ({"width": 1 << 30, "hidden_factor": 64}, "does not fit its weights"),
        ({"context": 10**15}, "positions has shape"),
        ({"block": "gpt", "steps": 10**9}, "1,000,000,000 layers, and"),
        ({"block": "gpt"}, "only one of both has"),
    ],
)
def test_a_configuration_that_does_not_fit_its_weights(run, model, said):
    """It is refused before a model is built that would take all memory."""
    fields = read_sealed(run / "config.json")
    (run / "config.json").write_text(sealed(fields | {"model": fields["model"] | model}))
    with pytest.raises(ValueError, match=said):
        load_run(run)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named(run, bad):
    for checkpoint in checkpoints(run / "checkpoints"):
        path = checkpoint / "model.safetensors"
        weights = load_file(path)
        weights["tokens"] = weights["tokens"].clone()
        weights["tokens"][3, 1] = bad
        save_file(weights, path)
        vouched(path)
    for words in (["sample", run], ["evaluate", run], ["export", run, "--to", "x"],
                  ["landscape", run, "--to", "x"], ["certificate", run]):  # fmt: skip
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == 2, done.output
        assert "tokens holds numbers that are not finite" in done.output
        assert not os.path.exists("x")


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "result.json", "tokenizer.json", "evaluation.json", "manifest.json"]
)
def test_nobody_waits_for_a_pipe(run, name):
    places = [run / name]
    if name == "manifest.json":
        places = [path / name for path in checkpoints(run / "checkpoints")]
    for place in places:
        place.unlink(missing_ok=True)
        os.mkfifo(place)
    if name in ("tokenizer.json", "evaluation.json", "manifest.json"):
        done = CliRunner().invoke(app, ["evaluate", str(run)])
        assert (done.exit_code == 2) == (name != "tokenizer.json"), done.output
    else:
        done = CliRunner().invoke(app, ["verify", str(run)])
        assert done.exit_code == 2
        assert f"{name} is no plain file" in done.output


def test_what_holds_no_fields_cannot_be_accepted(run):
    (run / "result.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"result\.json holds no fields"):
        accept_changes(run)


def test_verify_while_a_training_removes_checkpoints(run, monkeypatch):
    """A checkpoint that goes away is no damage; one that stays damaged is."""
    from nrgpt.train import checkpoint

    fault_of, newest = checkpoint.fault_of, checkpoints(run / "checkpoints")[0]

    def removing(path):
        if path == newest:
            shutil.rmtree(path)
        return fault_of(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "fault_of", removing)
        assert not [faults for _, faults in verify_run(run) if faults]
    (checkpoints(run / "checkpoints")[0] / "state.json").unlink()
    (damaged,) = [name for name, faults in verify_run(run) if faults]
    assert damaged.startswith("checkpoints/step-")


def test_ranks_are_not_written_behind_a_link(trained, tmp_path):
    """GPT-2's ranks lie beside the tokenizer of a run."""
    dataset = Dataset.open(next(p for p in (tmp_path.parents[0] / "data").iterdir() if p.is_dir()))
    manifest = dataset.manifest | {"extra_files": {RANKS: []}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / RANKS).write_text("ranks")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / RANKS).symlink_to("mine")
    other = Dataset(tmp_path / "data", manifest, dataset.tokenizer, dataset.vocab_size)
    with pytest.raises(NotOurs, match="is a link"):
        keep_tokenizer(tmp_path, other)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_database_of_trials_behind_a_link(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    (tmp_path / "theirs").write_bytes(b"")
    (folder / "sweep.db").symlink_to("../theirs")
    words = ["sweep", "debug", "optimiser.lr=log(1e-4,1e-2)", "--trials", "1", "--to", "s"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "sweep.db is a link" in done.output
    assert (tmp_path / "theirs").read_bytes() == b""


def test_names_with_formulas_are_drawn_as_they_are(tmp_path, monkeypatch):
    from nrgpt.train import report

    run = tmp_path / r"a$\frac_{$"
    loop.train(debug("iterations=8", *EVERY), run)
    report.plot_losses(run)
    assert (run / "losses.png").exists()


def test_all_weights_are_loaded(run):
    weights = load_file(checkpoints(run / "checkpoints")[0] / "model.safetensors")
    loaded = load_run(run, 8).model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in loaded.items())
