"""Models on a GPU: gradients, recordings, compilation, dynamics. Skipped where there is none."""

import copy
import dataclasses

import pytest
import torch

from nrgpt import LanguageModel, ModelConfig
from nrgpt.decode.generate import generate
from nrgpt.dynamics.landscape import TokenLandscape, lowest_curvatures, minimise
from nrgpt.dynamics.relax import Stop, relax
from nrgpt.dynamics.solvers import Anderson, Backtracking, Momentum, Plain
from nrgpt.dynamics.trajectory import trajectory
from nrgpt.kernels import dispatch
from nrgpt.train.config import OptimiserConfig
from nrgpt.train.packed_step import PackedStep
from nrgpt.train.presets import CERTIFIED, PRESETS, SETTLED
from tests.cases import NEEDS_GPU
from tests.models import (
    BLOCKS,
    COUPLINGS,
    DESCENDING,
    FEEDFORWARDS,
    MASKS,
    config,
    randomised,
    relative,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_GPU)


@pytest.mark.parametrize("fields", DESCENDING, ids=str)
def test_gradients_of_settled_and_safeguarded_models(fields):
    model = randomised(config(**fields), std=0.1 if fields.get("norm") == "none" else 0.3)
    idx = torch.randint(11, (3, 13))
    on_gpu = copy.deepcopy(model).cuda()
    for m, i in ((model, idx), (on_gpu, idx.cuda())):
        m(i, i)[1].backward()
    for (name, ours), theirs in zip(on_gpu.named_parameters(), model.parameters(), strict=True):
        # No softmax sees a bias of its keys: that gradient is zero, but for rounding.
        if theirs.grad is not None and not name.endswith(".b_K"):
            assert relative(ours.grad.cpu(), theirs.grad) < 1e-9, name


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("runs", [1, 2])
def test_a_settled_model_falls_in_recorded_bfloat16(runs, compiled):
    """Trained as its preset is: recorded, perhaps compiled, under autocast. Its energies fall in
    float32, and under autocast but for rounding."""
    torch._dynamo.reset()
    cfg = dataclasses.replace(PRESETS["shakespeare_nrgpt_settled"]().model, context=64, dropout=0.0)
    models = [LanguageModel(cfg).cuda() for _ in range(runs)]
    step = PackedStep(
        models,
        [OptimiserConfig(lr=1e-3, warmup=0)] * runs,
        precision=lambda: torch.autocast("cuda", dtype=torch.bfloat16),
        compile=compiled,
        graph=True,
    )
    x, y = torch.randint(65, (2, runs, 8, 64), device="cuda")
    exits = torch.stack([models[0].draw_exits(own, 0.15, 3) for own in x])
    rates = torch.ones(runs, dtype=torch.float64, device="cuda")
    losses = [step(x, y, None, exits, rates)[0].mean().item() for _ in range(8)]
    assert losses[-1] < losses[0]
    model = LanguageModel(cfg).cuda().eval()
    model.load_state_dict({name: value[0] for name, value in step.weights.items()})
    seen = trajectory(model, x[0], steps=2 * cfg.steps, readouts=False)
    assert (seen.energies["total"].diff(dim=0) <= 0).all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("fields", [FEEDFORWARDS[i] for i in (0, 2, 4, 5)], ids=str)
def test_gradients_of_all_parameters_equal_those_of_a_cpu(fields, coupling, mask):
    model = randomised(config(mask=mask, coupling=coupling, **fields))
    idx = torch.randint(11, (3, 13))
    on_gpu = copy.deepcopy(model).cuda()
    for m, i in ((model, idx), (on_gpu, idx.cuda())):
        m(i, i)[1].backward()
    for (name, ours), theirs in zip(on_gpu.named_parameters(), model.parameters(), strict=True):
        if theirs.grad is not None:
            assert relative(ours.grad.cpu(), theirs.grad) < 1e-12, name


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "fields",
    [{}, {"feedforward": "ff1"}, {"coupling": "full"}, {"rate": "free_per_term"}],
    ids=str,
)
def test_gradients_with_the_faster_kernels(fields, autocast, monkeypatch):
    """A model large enough for each of them, against itself without them."""
    cfg = ModelConfig(vocab_size=40_000, context=100, width=272, heads=2, steps=2, **fields)
    model = LanguageModel(cfg).cuda()
    text = torch.randint(40_000, (10, 101), device="cuda")
    gradients = []
    for kernels in ("", "plain"):
        monkeypatch.setenv("NRGPT_KERNELS", kernels)
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            _, loss = model(text[:, :-1], text[:, 1:], want_logits=False)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        assert relative(ours, theirs) < (5e-2 if autocast else 1e-3)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"width": 64, "rate": "free", "bias": True, "feedforward_scale": True},
        {"width": 100, "feedforward": "ff1", "bias": True},
        {"width": 128},
        {"width": 104, "heads": 8, "mask": "released", "rate": "free"},
    ],
    ids=str,
)
def test_gradients_of_a_small_model(fields, compiled, monkeypatch):
    """Small enough for feed-forward part and attention to be a kernel each, against the model
    without them."""
    torch._dynamo.reset()
    model = LanguageModel(ModelConfig(vocab_size=17, context=145, steps=3, **{"heads": 2} | fields))
    model.cuda()
    text = torch.randint(17, (7, 146), device="cuda")
    gradients = []
    for kernels in ("", "plain"):
        monkeypatch.setenv("NRGPT_KERNELS", kernels)
        is_compiled = compiled and not kernels
        forward = torch.compile(model, fullgraph=True) if is_compiled else model
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert dispatch.kernels_for(model.tokens) == (not kernels, not kernels)
            _, loss = forward(text[:, :-1], text[:, 1:], want_logits=False)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        assert relative(ours, theirs) < 5e-2


SMALL = ModelConfig(vocab_size=17, context=64, width=32, heads=2, steps=3, hidden_factor=2)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_recorded_update_is_the_same_update(block, optimiser):
    cfg = dataclasses.replace(SMALL, block=block)
    settings = [OptimiserConfig(name=optimiser, lr=lr) for lr in (1e-3, 3e-3)]
    torch.manual_seed(0)
    models = [LanguageModel(cfg).cuda() for _ in settings]
    plain = PackedStep(copy.deepcopy(models), settings)
    recorded = PackedStep(copy.deepcopy(models), settings, graph=True)
    for number in range(8):
        text = torch.randint(17, (2, 4, 65), device="cuda")
        rates = torch.full((2,), 1 / (1 + number), dtype=torch.float64, device="cuda")
        losses = [s(text[..., :-1], text[..., 1:], None, None, rates)[0] for s in (plain, recorded)]
        assert (losses[0] - losses[1]).abs().max() < 1e-4
    for name, weight in plain.weights.items():
        assert relative(recorded.weights[name], weight) < 1e-3, name


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("compile", [False, True])
def test_a_recorded_update_in_bfloat16(compile, runs):
    settings = [OptimiserConfig(lr=1e-3 * (1 + run)) for run in range(runs)]
    models = [LanguageModel(SMALL).cuda() for _ in settings]
    losses = []
    for options in ({}, {"graph": True, "compile": compile}):
        torch._dynamo.reset()
        step = PackedStep(
            copy.deepcopy(models),
            settings,
            precision=lambda: torch.autocast("cuda", dtype=torch.bfloat16),
            **options,
        )
        torch.manual_seed(0)
        for _ in range(8):
            text = torch.randint(17, (runs, 4, 65), device="cuda")
            rates = torch.ones(runs, dtype=torch.float64, device="cuda")
            found, fine = step(text[..., :-1], text[..., 1:], None, None, rates)
            assert fine.all()
        losses.append(found)
    assert (losses[0] - losses[1]).abs().max() < 1e-2


@pytest.mark.parametrize("part", ["gradients", "AdamW", "Muon"])
@pytest.mark.parametrize(
    ("runs", "fields"),
    [
        (1, {"vocab_size": 40_000, "width": 128}),  # a loss in chunks
        (1, {"vocab_size": 40_000, "width": 128, "block": "gpt"}),
        (1, {"vocab_size": 40_000, "width": 144, "heads": 1, "rate": "free_per_term"}),
        (1, {"vocab_size": 17, "width": 272, "coupling": "full"}),  # attention by tiles
        (3, {"vocab_size": 65, "width": 136}),  # a weight whose numbers are no multiple of 32
        (3, {"vocab_size": 65, "width": 256, "heads": 8, "dropout": 0.15} | CERTIFIED),
        (1, {"vocab_size": 40_000, "width": 128, "prelude_loops": 2} | SETTLED),
        (3, {"vocab_size": 65, "width": 128} | SETTLED),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:compiled, the gradient of")  # and so it is not: as wanted
def test_what_is_compiled_computes_the_same(runs, fields, part):
    cfg = ModelConfig(**{"context": 100, "heads": 4, "steps": 2} | fields)
    models = [LanguageModel(cfg).cuda() for _ in range(runs)]
    text = torch.randint(cfg.vocab_size, (runs, 10, 101), device="cuda")
    name = "muon" if part == "Muon" else "adamw"
    settings = [OptimiserConfig(name=name, lr=1e-3)] * runs
    masks = torch.stack([models[0].draw_masks(10, 100) for _ in range(runs)])
    found = []
    for compile in (False, True):
        step = PackedStep(
            copy.deepcopy(models),
            settings,
            precision=lambda: torch.autocast("cuda", dtype=torch.bfloat16),
            compile=compile,
        )
        if part == "gradients":
            if not step.is_proven:
                step.prove(text[..., :-1], text[..., 1:], masks, None, None)
            with step.computing():
                losses = step.losses(text[..., :-1], text[..., 1:], masks, None, None)
            found.append(torch.autograd.grad(losses.sum(), step.leaves))
        else:
            torch.manual_seed(1)
            gradients = [torch.randn_like(w) for w in step.optimiser.weights.values()]
            ones = torch.ones(runs, device="cuda")
            joined = step.optimiser.flat.joined(gradients)
            assert step.optimise(joined, ones, ones.double()).all()
            found.append([weight.detach() for weight in step.optimiser.weights.values()])
    for ours, theirs in zip(*found, strict=True):
        assert relative(ours, theirs) < (1e-5 if part == "AdamW" else 5e-2)


STILL = {name: value for name, value in SETTLED.items() if name != "block"}


def talkative(**fields):
    model = randomised(dataclasses.replace(SMALL, tied=False, **fields)).float().cuda()
    with torch.no_grad():
        model.tokens.mul_(5)
        model.positions.mul_(5)
    return model


@pytest.mark.parametrize(
    "fields",
    [{}, {"mask": "inclusive"}, {"coupling": "full"}, {"rate": "free_per_term"}, STILL],
    ids=str,
)
@pytest.mark.parametrize("block", BLOCKS)
def test_recorded_decoding_says_the_same(block, fields):
    model = talkative(block=block, **fields)
    prompts = [[3], [1, 2, 3, 4, 5, 6], list(range(16)) * 3]
    expected = generate(model, prompts, max_new_tokens=90, cache="none")
    assert generate(model, prompts, max_new_tokens=90) == expected
    stop = expected[1][7]
    assert generate(model, prompts, max_new_tokens=90, stop=stop) == [
        new[: new.index(stop)] if stop in new else new for new in expected
    ]


def test_compiled_steps_do_not_compile_again():
    model = LanguageModel(SMALL).cuda()
    compiled = torch.compile(model, fullgraph=True)
    text = torch.randint(17, (4, 65), device="cuda")
    losses = []
    for number in range(6):
        with (
            torch.autocast("cuda", dtype=torch.bfloat16),
            torch._dynamo.config.patch(error_on_recompile=number > 2),
        ):
            _, loss = compiled(text[:, :-1], text[:, 1:], want_logits=False)
        loss.backward()
        losses.append(loss.item())
    assert max(losses) - min(losses) < 1e-3


SOLVERS = {
    "plain": Plain(),
    "backtracking": Backtracking(),
    "momentum": Momentum(),
    "anderson": Anderson(),
}


def certified_pair():
    """A certified model in float64, on the CPU and on the GPU, and some tokens on each."""
    cfg = config(feedforward="memory", rate="gamma", learn_alpha=False)
    model = randomised(cfg)
    idx = torch.randint(11, (3, 13))
    return model, copy.deepcopy(model).cuda(), idx, idx.cuda()


def test_trajectories_of_a_gpu():
    model, on_gpu, idx, there = certified_pair()
    ours, theirs = trajectory(on_gpu, there, there, steps=9), trajectory(model, idx, idx, steps=9)
    assert relative(ours.energies["total"].cpu(), theirs.energies["total"]) < 1e-10
    assert relative(ours.loss.cpu(), theirs.loss) < 1e-10
    assert on_gpu.certificate(idx=there)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", SOLVERS)
def test_relaxing_on_a_gpu(name, frozen):
    found = []
    model, on_gpu, idx, there = certified_pair()
    for m, i in ((model, idx), (on_gpu, there)):
        past = relax(m, i).x if frozen else None
        stop = Stop("force", 1e-3)
        found.append(relax(m, i, steps=9, solver=SOLVERS[name], past=past, stop=stop))
    assert relative(found[1].x.cpu(), found[0].x) < 1e-6
    assert torch.equal(found[1].steps.cpu(), found[0].steps)


def test_the_landscape_of_a_gpu():
    model, on_gpu, idx, there = certified_pair()
    found = []
    for m, i in ((model, idx), (on_gpu, there)):
        land = TokenLandscape(m, i[:1], token=8)
        below = minimise(land, land.surface, land.trajectory()[-1:], iterations=300)
        values, _ = lowest_curvatures(land, land.surface, below.u[0], 2)
        found.append((below.energy.cpu(), values.cpu()))
    assert relative(found[1][0], found[0][0]) < 1e-6
    assert relative(found[1][1], found[0][1]) < 1e-3
