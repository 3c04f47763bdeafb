"""Recorded and packed runs against plain ones, and which of the three is used."""

import dataclasses
import json

import pytest
import torch

from nrgpt import EnergyTerm
from nrgpt.data.shards import Dataset
from nrgpt.decode.decoder import GraphedDecoder
from nrgpt.model.energy import ENERGIES
from nrgpt.train import loop, sweep
from nrgpt.train.checkpoint import newest_valid
from nrgpt.train.distributed import World
from nrgpt.train.faults import DIVERGED, TrainingError
from nrgpt.train.packed_step import PackedStep
from nrgpt.train.runs import load_run
from nrgpt.train.updates import Batch, Packed, Plain, Recorded, choose_update
from tests.models import relative
from tests.runs import debug, final_weights, losses, same, stop_at

SHORT = ("iterations=12", "save_every=5", "eval_every=6", "log_every=3", "model.dropout=0.1")
SEEDS_AND_RATES = [("seed=0",), ("seed=1", "optimiser.lr=1e-3"), ("seed=1", "optimiser.warmup=2")]


def pack(tmp_path, *fields, more=SEEDS_AND_RATES):
    cfgs = [debug(*SHORT, *fields, *own) for own in more]
    runs = [tmp_path / f"packed-{number}" for number in range(len(cfgs))]
    return cfgs, runs


def recorded(monkeypatch):
    """Have runs that are trained alone computed as recorded ones are. On a CPU nothing is recorded,
    but all else is the same."""
    monkeypatch.setattr(loop, "choose_update", lambda cfgs, where: Recorded)


def test_runs_equal_their_lone_ones(tmp_path):
    cfgs, runs = pack(tmp_path)
    results = loop.train_packed(cfgs, runs)
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
    results = loop.train_packed(cfgs, runs)
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
    assert {result["step"] for result in loop.train_packed(longer, runs)} == {14}


def newest_state(run):
    newest, _ = newest_valid(run / "checkpoints")
    return json.loads((newest / "state.json").read_text())


@pytest.mark.parametrize(
    "fields",
    [
        ("model.dropout=0.1",),
        (
            "model.feedforward=memory",
            "model.safeguard=cone",
            "model.past=settled",
            "model.mask=inclusive",
            "model.write=free",
            "model.rate=gains",
            "model.prelude=1",
            "model.drive=true",
            "early_exits=0.5",
        ),
        ("model.learn_gamma=false", "optimiser.clip=none", "random_steps=(1,3)"),
        ("model.block=gpt", "model.tied=false"),
    ],
    ids=str,
)
def test_a_recorded_run_equals_a_plain_one(tmp_path, monkeypatch, fields):
    """In a recorded run the model's weights are parts of the optimiser's buffer."""
    cfg = debug(*SHORT, *fields)
    expected = loop.train(cfg, tmp_path / "plain")
    with monkeypatch.context() as patch:
        recorded(patch)
        found = loop.train(cfg, tmp_path / "recorded")
    assert abs(found["val_loss_full"] - expected["val_loss_full"]) < 1e-5
    for ours, theirs in zip(losses(tmp_path / "recorded"), losses(tmp_path / "plain"), strict=True):
        assert all(abs(ours[key] - theirs[key]) < 1e-5 for key in theirs)
    ours, theirs = final_weights(tmp_path / "recorded"), final_weights(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    assert all(relative(ours[name], theirs[name]) < 1e-5 for name in ours)
    longer = dataclasses.replace(cfg, iterations=14)  # either kind goes on with the other's run
    assert loop.train(longer, tmp_path / "recorded")["step"] == 14
    recorded(monkeypatch)
    assert loop.train(longer, tmp_path / "plain")["step"] == 14


class Pull(EnergyTerm):
    """A feed-forward energy of one's own: no readout, and a buffer."""

    def __init__(self, cfg):
        super().__init__()
        self.register_buffer("direction", torch.randn(cfg.width))

    def energy(self, z, keys):
        return -(z @ self.direction)


def test_energies_with_buffers_and_without_readouts(tmp_path, monkeypatch):
    monkeypatch.setitem(ENERGIES, "pull", Pull)
    recorded(monkeypatch)
    cfg = debug(*SHORT, "model.feedforward=pull")
    assert loop.train(cfg, tmp_path / "pack")["step"] == 12
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
    loop.train_packed(cfgs, runs)
    other = [dataclasses.replace(cfg, iterations=14) for cfg in cfgs]
    monkeypatch.setattr(Dataset, "fingerprint", "another")
    tokenizer = runs[0] / "tokenizer.json"
    tokenizer.write_text("as it was")
    with pytest.raises(ValueError, match="is not the dataset that"):
        loop.train_packed(other, runs)
    assert tokenizer.read_text() == "as it was"


GPU = World(0, 1, torch.device("cuda"))
CPU = World(0, 1, torch.device("cpu"))


def test_which_update_is_used():
    two = [debug("graph=true", f"seed={seed}") for seed in (0, 1)]
    assert choose_update(two, GPU) is choose_update(two, CPU) is Packed
    assert choose_update(two[:1], GPU) is Recorded
    assert choose_update([debug("graph=true", "random_steps=(1,3)")], GPU) is Recorded
    assert choose_update([debug()], GPU) is Plain
    anything = ("accumulation=2", "checkpoint_steps=true", "deterministic=true", "parallel=fsdp")
    assert choose_update([debug(*anything)], GPU) is Plain
    # A CPU has nothing to record, so graph asks for nothing there.
    assert choose_update([debug("graph=true", *anything)], CPU) is Plain


GPT = ("model.block=gpt", "random_steps=(1,3)")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (("accumulation=2",), "accumulation = 2"),
        (("checkpoint_steps=true",), "checkpoint_steps = True"),
        (("deterministic=true", "parallel=fsdp"), "deterministic = True and parallel = 'fsdp'"),
        (GPT, r"random_steps = \(1, 3\) with model.block = 'gpt'"),
    ],
    ids=str,
)
def test_what_cannot_be_combined_is_refused(fields, said):
    alone = ": cannot be combined with graph = True; do without, or set graph=false"
    with pytest.raises(ValueError, match=said + alone):
        choose_update([debug("graph=true", *fields)], GPU)
    packed = [debug(*fields, f"optimiser.lr={rate}") for rate in (1e-3, 2e-3)]
    with pytest.raises(ValueError, match=f"{said}: cannot be combined with packed runs; .* one by"):
        choose_update(packed, CPU)


def test_recorded_and_packed_runs_are_for_one_process():
    with pytest.raises(ValueError, match=r"2 processes: .* graph = True; do without"):
        choose_update([debug("graph=true")], World(0, 2, torch.device("cuda")))
    with pytest.raises(ValueError, match=r"2 processes: .* packed runs"):
        choose_update([debug(), debug("seed=1")], World(0, 2, torch.device("cpu")))


def test_speeds_do_not_count_evaluations(tmp_path, monkeypatch):
    """Tokens and seconds are of the same updates, whatever lies between."""
    speeds = []
    clock = iter(range(10_000))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(clock)))
    log = loop.Trainer.log
    monkeypatch.setattr(
        loop.Trainer,
        "log",
        lambda self, losses, speed: (speeds.append(speed), log(self, losses, speed)),
    )
    cfg = debug("iterations=9", "log_every=4", "eval_every=3", "save_every=9", "optimiser.warmup=2")
    loop.train(cfg, tmp_path / "run")
    # Each line after one tick of the clock: updates 4 (since an evaluation at 3), and 7 and 8.
    assert speeds == [1, 2]


def test_stopped_and_continued(tmp_path, monkeypatch):
    cfgs, runs = pack(tmp_path)
    _, whole = cfgs, [tmp_path / f"whole-{n}" for n in range(3)]
    loop.train_packed(cfgs, whole)
    stop_at(monkeypatch, 7)
    with pytest.raises(TrainingError, match="saved at iteration 7"):
        loop.train_packed(cfgs, runs)
    monkeypatch.undo()
    loop.train(cfgs[0], tmp_path / "packed-0")  # one of them alone, to its end
    lone = final_weights(tmp_path / "packed-0")
    loop.train_packed(cfgs[1:], runs[1:])
    assert same(final_weights(runs[1]), final_weights(whole[1]))
    assert losses(runs[2]) == losses(whole[2])
    assert all(relative(lone[k], v) < 1e-3 for k, v in final_weights(whole[0]).items())


def test_a_run_that_is_not_finite_leaves_the_others(tmp_path, monkeypatch):
    cfgs, runs = pack(tmp_path)
    whole = [tmp_path / f"whole-{n}" for n in range(3)]
    loop.train_packed(cfgs, whole)
    original = PackedStep.losses_of_all

    def poisoned(self, x, y, masks, exits, steps):
        found = original(self, x, y, masks, exits, steps)
        is_bad = self.optimiser.updates[1] == 8
        nan = torch.tensor([1.0, float("nan") if is_bad else 1.0, 1.0])
        return found * nan

    monkeypatch.setattr(PackedStep, "losses_of_all", poisoned)
    loop.train_packed(cfgs, runs)
    for number in (0, 2):
        assert same(final_weights(runs[number]), final_weights(whole[number]))
    for name, value in final_weights(whole[1]).items():  # went on alone, from step 5
        assert relative(final_weights(runs[1])[name], value) < 1e-3
    assert json.loads((runs[1] / "result.json").read_text())["step"] == 12


def test_a_recorded_run_goes_back_with_a_smaller_rate(tmp_path, monkeypatch):
    """The failure is noticed at step 9, when something is written, and known to be of step 7."""
    recorded(monkeypatch)
    cfg = debug("iterations=12", "save_every=5", "eval_every=12", "log_every=3")
    original, rates = PackedStep.loss_of_one, []

    def poisoned(self, x, y, masks, exits, steps):
        loss = original(self, x, y, masks, exits, steps)
        is_bad = self.optimiser.updates[0] == 7 and not rates
        if is_bad:
            rates.append(self.optimiser.updates.item())
        return loss * float("nan") if is_bad else loss

    monkeypatch.setattr(PackedStep, "loss_of_one", poisoned)
    said = []
    monkeypatch.setattr(loop.Trainer, "say", lambda self, text: said.append(text))
    result = loop.train(cfg, tmp_path / "run")
    assert (result["step"], result["rollbacks"]) == (12, 1)
    assert said[0].startswith(
        "iteration 7: loss nan, gradient norm nan: not finite; back to iteration 5"
    )
    steps = [entry["step"] for entry in losses(tmp_path / "run")]
    assert steps == [3, 6, 9, 12, 12]
    assert newest_state(tmp_path / "run")["rate_factor"] == 0.5


def test_a_recorded_run_goes_back_to_the_start_of_a_plain_one():
    """Whose checkpoint has no optimiser state yet."""
    cfg = debug("optimiser.name=muon", "model.dropout=0")
    plain, update = Plain([cfg], CPU), Recorded([cfg], CPU)
    start, nothing = plain.tensors(0)
    assert nothing == {}
    x, y = torch.randint(10, (2, 1, 8, 32))
    for step in range(3):
        update(Batch(step, x, y, None, [0], [1.0]))
    assert any(state.any() for state in update.tensors(0)[1].values())
    update.load(0, start, nothing)
    weights, state = update.tensors(0)
    assert same(weights, start)
    assert not any(value.any() for value in state.values())
    assert update.failures() == [None]


def test_a_recorded_run_that_stays_not_finite_ends_as_a_plain_one(tmp_path, monkeypatch):
    """A huge first update: only the checkpoint before it helps, and not with any rate."""
    recorded(monkeypatch)
    cfg = debug("iterations=8", "save_every=1", "eval_every=8", "optimiser.lr=1e30")
    with pytest.raises(TrainingError, match="not finite, after 3 retries") as stopped:
        loop.train(cfg, tmp_path / "run")
    assert stopped.value.code == DIVERGED
    assert (tmp_path / "run" / "checkpoints" / "not-finite-step-00000001").is_dir()


def test_what_cannot_be_packed(tmp_path):
    with pytest.raises(ValueError, match="differ in seed, data and the numbers of the optimiser"):
        loop.train_packed(*pack(tmp_path, more=[("model.width=8",), ("model.width=16",)]))
    with pytest.raises(ValueError, match=r"random_steps = \(1, 3\).*train the runs one by one"):
        loop.train_packed(*pack(tmp_path, "random_steps=(1,3)"))
    cfgs, runs = pack(tmp_path)
    with pytest.raises(ValueError, match="a folder of its own"):
        loop.train_packed(cfgs, [runs[0]] * 3)
    assert not any(run.exists() for run in runs)


def test_sweeps_pack_runs_of_one_shape(tmp_path, monkeypatch):
    sizes = []
    original = sweep.train_packed

    def counted(cfgs, runs):
        sizes.append([cfg.model.width for cfg in cfgs])
        return original(cfgs, runs)

    monkeypatch.setattr(sweep, "train_packed", counted)
    monkeypatch.setattr(sweep, "train", lambda *_: pytest.fail("a run was not packed"))
    choices = ("model.width=8,16", "seed=0,1,2")
    rows = sweep.run_sweep("debug", debug(*SHORT), choices, tmp_path / "s", packed=2)
    assert len(rows) == 6
    assert sizes == [[8, 8], [8], [16, 16], [16]]
    again = sweep.run_sweep("debug", debug(*SHORT), choices, tmp_path / "s", packed=2)
    assert again == rows
    assert len(sizes) == 4
