"""Packed runs against their lone ones."""

import dataclasses
import json
import os
import signal

import pytest
import torch

from nrgpt import EnergyTerm
from nrgpt.data.shards import Dataset
from nrgpt.decode.decoder import GraphedDecoder
from nrgpt.model.energy import ENERGIES
from nrgpt.train import loop, packed, sweep
from nrgpt.train.checkpoint import newest_valid
from nrgpt.train.faults import TrainingError
from nrgpt.train.packed_step import PackedStep
from nrgpt.train.runs import load_run
from tests.models import relative
from tests.runs import debug, final_weights, losses, same

SHORT = ("iterations=12", "save_every=5", "eval_every=6", "log_every=3", "model.dropout=0.1")
SEEDS_AND_RATES = [("seed=0",), ("seed=1", "optimiser.lr=1e-3"), ("seed=1", "optimiser.warmup=2")]


def pack(tmp_path, *fields, more=SEEDS_AND_RATES):
    cfgs = [debug(*SHORT, *fields, *own) for own in more]
    runs = [tmp_path / f"packed-{number}" for number in range(len(cfgs))]
    return cfgs, runs


def test_runs_equal_their_lone_ones(tmp_path):
    cfgs, runs = pack(tmp_path)
    results = packed.train_packed(cfgs, runs)
    for number, (cfg, run) in enumerate(zip(cfgs, runs, strict=True)):
        lone = tmp_path / f"lone-{number}"
        result = loop.train(cfg, lone)
        for name, value in final_weights(lone).items():
            assert relative(final_weights(run)[name], value) < 1e-3, name
        for ours, theirs in zip(losses(run), losses(lone), strict=True):
            assert ours.keys() == theirs.keys()
            assert all(abs(ours[key] - theirs[key]) < 1e-4 for key in ours)
        assert results[number].keys() == result.keys()
        assert abs(results[number]["val_loss_full"] - result["val_loss_full"]) < 1e-4
        assert {path.name for path in lone.iterdir()} == {path.name for path in run.iterdir()}
    assert results[1]["val_loss_full"] != results[2]["val_loss_full"]


def test_runs_of_different_data_equal_their_lone_ones(tmp_path):
    """Each with its own batches, tests and dataset to go on with."""
    more = [("seed=1",), ("seed=1", "data.listops.answers=direct"), ("seed=2",)]
    cfgs, runs = pack(tmp_path, more=more)
    results = packed.train_packed(cfgs, runs)
    for number, (cfg, run) in enumerate(zip(cfgs, runs, strict=True)):
        lone = tmp_path / f"lone-{number}"
        result = loop.train(cfg, lone)
        for ours, theirs in zip(losses(run), losses(lone), strict=True):
            assert all(abs(ours[key] - theirs[key]) < 1e-4 for key in theirs)
        assert abs(results[number]["val_loss_full"] - result["val_loss_full"]) < 1e-4
        assert results[number]["listops"]["total"] == result["listops"]["total"]
    states = [newest_state(run)["dataset"] for run in runs]
    assert states[0] == states[2] != states[1]
    longer = [dataclasses.replace(cfg, iterations=14) for cfg in cfgs]
    assert {result["step"] for result in packed.train_packed(longer, runs)} == {14}


def newest_state(run):
    newest, _ = newest_valid(run / "checkpoints")
    return json.loads((newest / "state.json").read_text())


@pytest.mark.parametrize(
    "fields",
    [
        ("model.dropout=0.1",),
        ("model.learn_gamma=false", "optimiser.clip=none", "random_steps=(1,3)"),
        ("model.block=gpt", "model.tied=false"),
    ],
    ids=str,
)
def test_a_pack_of_one_equals_a_lone_run(tmp_path, fields):
    """What a recorded run of one is: its model's weights are parts of the pack's buffer."""
    cfg = debug(*SHORT, *fields)
    (found,) = packed.train_packed([cfg], [tmp_path / "pack"])
    expected = loop.train(cfg, tmp_path / "lone")
    assert abs(found["val_loss_full"] - expected["val_loss_full"]) < 1e-5
    ours, theirs = final_weights(tmp_path / "pack"), final_weights(tmp_path / "lone")
    assert ours.keys() == theirs.keys()
    assert all(relative(ours[name], theirs[name]) < 1e-5 for name in ours)
    longer = dataclasses.replace(cfg, iterations=14)  # the ordinary loop goes on with it
    assert loop.train(longer, tmp_path / "pack")["step"] == 14


class Pull(EnergyTerm):
    """A feed-forward energy of one's own: no readout, and a buffer."""

    def __init__(self, cfg):
        super().__init__()
        self.register_buffer("direction", torch.randn(cfg.width))

    def energy(self, z, keys):
        return -(z @ self.direction)


def test_energies_with_buffers_and_without_readouts(tmp_path, monkeypatch):
    monkeypatch.setitem(ENERGIES, "pull", Pull)
    cfg = debug(*SHORT, "model.feedforward=pull")
    (found,) = packed.train_packed([cfg], [tmp_path / "pack"])
    assert found["step"] == 12
    assert "blocks.0.energy.terms.feedforward.direction" in final_weights(tmp_path / "pack")
    model = load_run(tmp_path / "pack").model
    decoder = GraphedDecoder(model, [[1, 2]], "exact", None)
    with torch.no_grad():
        decoder.feed(decoder.next_logits().argmax(-1))
        decoder.feed(decoder.next_logits().argmax(-1))
    assert [decoder.read(), decoder.read()] == [
        [token] for token in model.generate([[1, 2]], max_new_tokens=2, cache="none")[0]
    ]


def test_a_pack_refuses_another_dataset(tmp_path, monkeypatch):
    cfgs, runs = pack(tmp_path)
    packed.train_packed(cfgs, runs)
    other = [dataclasses.replace(cfg, iterations=14) for cfg in cfgs]
    monkeypatch.setattr(Dataset, "fingerprint", "another")
    tokenizer = runs[0] / "tokenizer.json"
    tokenizer.write_text("as it was")
    with pytest.raises(ValueError, match="is not the dataset that"):
        packed.train_packed(other, runs)
    assert tokenizer.read_text() == "as it was"


def test_what_is_recorded(monkeypatch, tmp_path):
    """One process on a GPU with nothing that a recording cannot do."""
    taken = []
    monkeypatch.setattr(packed, "train_packed", lambda cfgs, runs: taken.append("graph") or [{}])
    monkeypatch.setattr(packed, "train", lambda cfg, run: taken.append("loop") or {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for fields, expected in {
        ("graph=true",): "graph",
        ("graph=true", "random_steps=(1,3)"): "graph",
        (): "loop",
        ("graph=true", "device=cpu"): "loop",
        ("graph=true", "accumulation=2"): "loop",
        ("graph=true", "checkpoint_steps=true"): "loop",
        ("graph=true", "deterministic=true"): "loop",
        ("graph=true", "model.block=gpt", "random_steps=(1,3)"): "loop",
    }.items():
        packed.train_one(debug(*fields), tmp_path)
        assert taken.pop() == expected, fields
    monkeypatch.setenv("WORLD_SIZE", "2")
    packed.train_one(debug("graph=true"), tmp_path)
    assert taken == ["loop"]


def test_speeds_do_not_count_evaluations(tmp_path, monkeypatch):
    """Tokens and seconds are of the same updates, whatever lies between."""
    speeds = []
    clock = iter(range(10_000))
    monkeypatch.setattr(packed.time, "perf_counter", lambda: float(next(clock)))
    log = packed.Pack.log
    monkeypatch.setattr(
        packed.Pack,
        "log",
        lambda self, losses, speed: (speeds.append(speed), log(self, losses, speed)),
    )
    cfg = debug("iterations=9", "log_every=4", "eval_every=3", "save_every=9", "optimiser.warmup=2")
    packed.train_packed([cfg], [tmp_path / "run"])
    # Each line after one tick of the clock: updates 4 (since an evaluation at 3), and 7 and 8.
    assert speeds == [1 * 8 * 32, 2 * 8 * 32]


def stop_at(monkeypatch, step):
    original = packed.Pack.iterate

    def iterate(self):
        found = original(self)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(packed.Pack, "iterate", iterate)


def test_stopped_and_continued(tmp_path, monkeypatch):
    cfgs, runs = pack(tmp_path)
    _, whole = cfgs, [tmp_path / f"whole-{n}" for n in range(3)]
    packed.train_packed(cfgs, whole)
    stop_at(monkeypatch, 7)
    with pytest.raises(TrainingError, match="saved at step 7"):
        packed.train_packed(cfgs, runs)
    monkeypatch.undo()
    loop.train(cfgs[0], tmp_path / "packed-0")  # one of them alone, to its end
    lone = final_weights(tmp_path / "packed-0")
    packed.train_packed(cfgs[1:], runs[1:])
    assert same(final_weights(runs[1]), final_weights(whole[1]))
    assert losses(runs[2]) == losses(whole[2])
    assert all(relative(lone[k], v) < 1e-3 for k, v in final_weights(whole[0]).items())


def test_a_run_that_is_not_finite_leaves_the_others(tmp_path, monkeypatch):
    cfgs, runs = pack(tmp_path)
    whole = [tmp_path / f"whole-{n}" for n in range(3)]
    packed.train_packed(cfgs, whole)
    original = PackedStep.losses_of_all

    def poisoned(self, x, y, masks, steps):
        found = original(self, x, y, masks, steps)
        is_bad = self.optimiser.updates[1] == 8
        nan = torch.tensor([1.0, float("nan") if is_bad else 1.0, 1.0])
        return found * nan

    monkeypatch.setattr(PackedStep, "losses_of_all", poisoned)
    packed.train_packed(cfgs, runs)
    for number in (0, 2):
        assert same(final_weights(runs[number]), final_weights(whole[number]))
    for name, value in final_weights(whole[1]).items():  # went on alone, from step 5
        assert relative(final_weights(runs[1])[name], value) < 1e-3
    assert json.loads((runs[1] / "result.json").read_text())["step"] == 12


def test_what_cannot_be_packed(tmp_path):
    with pytest.raises(ValueError, match="differ in seed, data and the numbers of the optimiser"):
        packed.train_packed(*pack(tmp_path, more=[("model.width=8",), ("model.width=16",)]))
    with pytest.raises(ValueError, match="accumulation = 2: must be 1"):
        packed.train_packed(*pack(tmp_path, "accumulation=2"))
    for field in ("checkpoint_steps", "deterministic"):
        with pytest.raises(ValueError, match=f"{field} = True"):
            packed.train_packed(*pack(tmp_path, f"{field}=true"))
    gpt = ("model.block=gpt", "random_steps=(1,3)")
    with pytest.raises(ValueError, match="leaves blocks out"):
        packed.train_packed(*pack(tmp_path, *gpt, more=[("optimiser.lr=1e-3",), ()]))
    cfgs, runs = pack(tmp_path)
    with pytest.raises(ValueError, match="a folder of its own"):
        packed.train_packed(cfgs, [runs[0]] * 3)


def test_sweeps_pack_runs_of_one_shape(tmp_path, monkeypatch):
    sizes = []
    original = sweep.train_packed

    def counted(cfgs, runs):
        sizes.append([cfg.model.width for cfg in cfgs])
        return original(cfgs, runs)

    monkeypatch.setattr(sweep, "train_packed", counted)
    monkeypatch.setattr(sweep, "train_one", lambda *_: pytest.fail("a run was not packed"))
    choices = ("model.width=8,16", "seed=0,1,2")
    rows = sweep.run_sweep("debug", debug(*SHORT), choices, tmp_path / "s", packed=2)
    assert len(rows) == 6
    assert sizes == [[8, 8], [8], [16, 16], [16]]
    again = sweep.run_sweep("debug", debug(*SHORT), choices, tmp_path / "s", packed=2)
    assert again == rows
    assert len(sizes) == 4
