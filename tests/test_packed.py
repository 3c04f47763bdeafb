"""Packed runs against their lone ones."""

import copy
import dataclasses
import json
import os
import signal
import warnings

import pytest
import torch

from nrgpt import EnergyTerm, sweep
from nrgpt.data.shards import Dataset
from nrgpt.decoder import GraphedDecoder
from nrgpt.energy import FEEDFORWARD
from nrgpt.runs import load_run
from nrgpt.train import loop, packed
from nrgpt.train.checkpoint import newest_valid
from nrgpt.train.config import OptimiserConfig
from nrgpt.train.faults import TrainingError
from nrgpt.train.optim import make_optimisers, set_rate
from nrgpt.train.packed_optim import Flat, PackedOptimiser, newton_schulz
from nrgpt.train.packed_step import PackedStep
from tests.models import BLOCKS, config, randomised, relative
from tests.runs import debug, final_weights, losses, same

VARIANTS = [
    {},
    {"mask": "inclusive"},
    {"mask": "released", "coupling": "full"},
    {"rate": "free_per_step", "feedforward": "ff1", "dropout": 0.2},
    {"rate": "state", "norm": "rmsnorm", "learn_gamma": False},
    *({"block": block, "dropout": 0.2} for block in BLOCKS[1:]),
]
OPTIMISERS = [
    OptimiserConfig(lr=1e-2, clip=None),
    OptimiserConfig(lr=3e-2, clip=0.1, beta1=0.8, beta2=0.95, weight_decay=0.5),
    OptimiserConfig(lr=1e-3, weight_decay=0.0),
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_updates_equal_those_of_torch(fields):
    cfg = config(**fields)
    models = [randomised(cfg).train() for _ in OPTIMISERS]
    lone = copy.deepcopy(models)
    step = PackedStep(models, OPTIMISERS)
    optimisers = [
        make_optimisers(model, own, torch.device("cpu"))
        for model, own in zip(lone, OPTIMISERS, strict=True)
    ]
    for count in range(1, 4):
        x, y = torch.randint(11, (2, 3, 2, 7))
        masks = None
        if cfg.dropout:
            masks = torch.stack([models[0].draw_masks(2, 7) for _ in OPTIMISERS])
        rates = torch.tensor([1.0, 0.5, 0.1 * count], dtype=torch.float64)
        found, fine = step(x, y, masks, rates)
        assert fine.all()
        for run, (model, own) in enumerate(zip(lone, OPTIMISERS, strict=True)):
            model.zero_grad()
            _, loss = model(x[run], y[run], masks=None if masks is None else masks[run])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(
                model.parameters(), float("inf") if own.clip is None else own.clip
            )
            set_rate(optimisers[run], rates[run].item())
            for optimiser in optimisers[run]:
                optimiser.step()
            assert abs(found[run].item() - loss.item()) < 1e-12
    for run, model in enumerate(lone):
        for name, value in model.named_parameters():
            assert relative(step.weights[name][run], value) < 1e-9, name


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "is_wrong"), [(None, False), ("rate.log_c", True)])
def test_a_pack_does_without_a_compiler_that_errs(monkeypatch, name, is_wrong, precision):
    def compiled(function, **options):
        def computed(x, y, masks, steps):
            if name is None:
                return function(x, y, masks, steps)
            key = f"blocks.0.{name}"
            right, step.weights[key] = step.weights[key], step.weights[key] + 0.1
            losses = function(x, y, masks, steps)
            step.weights[key] = right
            return losses

        return computed if getattr(function, "__name__", "") == "losses_of_all" else function

    monkeypatch.setattr(torch, "compile", compiled)
    models = [randomised(config(rate="gamma_per_step")).float() for _ in range(2)]
    x, y = torch.randint(11, (2, 2, 3, 7))
    rates = torch.zeros(2, dtype=torch.float64)
    step = PackedStep(
        copy.deepcopy(models),
        [OptimiserConfig()] * 2,
        compile=True,
        precision=lambda: torch.autocast("cpu", dtype=precision, enabled=precision.itemsize < 4),
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(x, y, None, rates)
    said = [str(one.message) for one in said if "go on without compilation" in str(one.message)]
    assert len(said) == is_wrong
    assert (step.losses == step.losses_of_all) == is_wrong


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (9, 9)])
def test_muon_equals_that_of_torch(shape):
    """To the rounding of bfloat16, which both compute with."""
    start, gradients = torch.randn(3, *shape), torch.randn(2, 3, *shape)
    rates = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    own = [OptimiserConfig(name="muon", muon_lr=0.1, clip=None)] * 3
    packed = PackedOptimiser({"W": start, "V": start.mT}, ["W", "V"], own)
    lone = [torch.nn.Parameter(w.clone()) for w in start]
    optimisers = [
        torch.optim.Muon([w], lr=0.1 * (run + 1), weight_decay=own[0].weight_decay)
        for run, w in enumerate(lone)
    ]
    for gradient in gradients:
        joined = packed.flat.joined([gradient, gradient.mT])
        assert packed.step(joined, torch.zeros(3), rates).all()
        for w, own_gradient, optimiser in zip(lone, gradient, optimisers, strict=True):
            w.grad = own_gradient.clone()
            optimiser.step()
    for run, w in enumerate(lone):
        moved = (w - start[run]).norm()
        assert (packed.weights["W"][run] - w).norm() < 0.02 * moved
    wide = gradients[0] if shape[0] <= shape[1] else gradients[0].mT
    singular = torch.linalg.svdvals(newton_schulz(wide).float())
    assert 0.3 < singular.min() < singular.max() < 1.6


def test_weights_side_by_side_and_back():
    """Parts that do not fill their places, and one that is turned."""
    weights = {"a": torch.randn(2, 3, 5), "b": torch.randn(2), "c": torch.randn(2, 16)}
    flat = Flat(weights)
    parts = [weights["a"].mT.contiguous().mT, weights["b"], weights["c"]]
    buffer = flat.joined(parts)
    assert buffer.shape == (2, flat.size) == (2, 48)
    assert all(
        torch.equal(*pair) for pair in zip(flat.views(buffer), weights.values(), strict=True)
    )
    assert buffer.count_nonzero() == 2 * (15 + 1 + 16)
    assert torch.equal(flat.joined(parts[:1]), buffer[:, :16])


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
    monkeypatch.setitem(FEEDFORWARD, "pull", Pull)
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
