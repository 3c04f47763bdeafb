"""What differs on a GPU, against the plain versions. Skipped where there is none."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nrgpt import LanguageModel, ModelConfig
from nrgpt.dynamics.landscape import TokenLandscape, lowest_curvatures, minimise
from nrgpt.dynamics.relax import Stop, relax
from nrgpt.dynamics.solvers import Anderson, Backtracking, Momentum, Plain
from nrgpt.dynamics.trajectory import trajectory
from nrgpt.generate import generate
from nrgpt.kernels import dispatch
from nrgpt.kernels.attention import attend, attend_read, plain_attend_read
from nrgpt.kernels.feedforward import (
    feedforward,
    force_beside,
    pair_force,
    plain_feedforward,
    plain_pair_force,
    plain_square_force,
    square_force,
)
from nrgpt.kernels.loss import head_loss, plain_loss
from nrgpt.train.config import OptimiserConfig
from nrgpt.train.packed_step import PackedStep
from tests.models import BLOCKS, COUPLINGS, FEEDFORWARDS, MASKS, config, randomised, relative

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ODD = (63, 145, 1000)
LARGEST = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Relative error against float64 that a precision may show."""


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("tokens", ODD)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize(
    ("fused", "plain"), [(pair_force, plain_pair_force), (square_force, plain_square_force)]
)
def test_forces(fused, plain, activation, tokens, dtype):
    wide = torch.randn(3, tokens, 310, device="cuda").to(dtype)
    z = wide[..., 7:297].requires_grad_()  # a strided part, as of one large product
    up = torch.randn_like(z)
    exact = z.detach().double().requires_grad_()
    assert dispatch.choose(z).fused
    found, expected = fused(z, activation), plain(exact, activation)
    assert relative(found.double(), expected) < LARGEST[dtype]
    (found,) = torch.autograd.grad(found, z, up)
    (expected,) = torch.autograd.grad(expected, exact, up.double())
    assert relative(found.double(), expected) < LARGEST[dtype]


def feedforward_inputs(tokens, width, hidden, *, pair, bias, runs=()):
    """g, R, bias and write in bfloat16, as what a step makes of a model's weights."""
    rows = 2 * hidden if pair else hidden
    shapes = [(tokens, width), (rows, width), (rows,) if bias else None, (width, rows)]
    scales = [1, width**-0.5, 1, rows**-0.5]
    return [
        None
        if shape is None
        else (scale * torch.randn(*runs, *shape, device="cuda")).bfloat16().requires_grad_()
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def compare_with_float64(fused, plain, inputs, most=LARGEST[torch.bfloat16]):
    """Results and all gradients of two functions of the same inputs, some of which are None."""
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    found, expected = fused(*inputs), plain(*exact)
    assert relative(found.double(), expected) < most
    up = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, [x for x in inputs if x is not None], up),
        torch.autograd.grad(expected, [x for x in exact if x is not None], up.double()),
        strict=True,
    ):
        assert relative(ours.double(), theirs) < most


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize(
    ("tokens", "width", "hidden", "bias", "activation"),
    [
        (63, 24, 145, True, "gelu"),
        (145, 64, 256, False, "gelu_tanh"),
        (1000, 100, 145, True, "relu"),
        (1000, 128, 512, False, "gelu"),
        (145, 128, 145, True, "gelu_tanh"),
    ],
)
def test_feedforward(tokens, width, hidden, bias, activation, pair):
    inputs = feedforward_inputs(tokens, width, hidden, pair=pair, bias=bias)
    assert dispatch.choose_feedforward(inputs[0]).fused
    compare_with_float64(
        lambda g, R, b, write: feedforward(g, R, b, write, None, activation, pair=pair),
        lambda g, R, b, write: plain_feedforward(g, R, b, write, activation, pair),
        inputs,
    )


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize(
    ("tokens", "width", "hidden", "bias"), [(63, 24, 145, True), (1000, 64, 256, False)]
)
def test_packed_feedforward(tokens, width, hidden, bias, pair):
    inputs = feedforward_inputs(tokens, width, hidden, pair=pair, bias=bias, runs=(3,))
    dims = (0, 0, 0 if bias else None, 0)

    def fused(g, R, b, write):
        return feedforward(g, R, b, write, None, "gelu", pair=pair)

    def plain(g, R, b, write):
        return plain_feedforward(g, R, b, write, "gelu", pair)

    with dispatch.packed():
        compare_with_float64(torch.vmap(fused, dims), torch.vmap(plain, dims), inputs)


def test_feedforward_can_be_differentiated_again():
    inputs = feedforward_inputs(63, 24, 20, pair=True, bias=True)
    second = []
    for function in (
        lambda *x: feedforward(*x, None, "gelu", pair=True),
        lambda *x: plain_feedforward(*x, "gelu", True),
    ):
        first = torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=True)
        second.append(torch.autograd.grad(sum(x.square().sum() for x in first), inputs))
    for ours, theirs in zip(*second, strict=True):
        assert relative(ours, theirs) < 5e-2


def read_out(tokens, heads, size, *, larger=1.0, runs=()):
    """Queries and keys in bfloat16, as the readout leaves them."""
    z = torch.randn(*runs, 3, tokens, 2 * heads * size, device="cuda")
    return (larger * z).bfloat16().requires_grad_()


def both_of_short_contexts(heads, size, strict):
    scale = size**-0.5
    return (
        lambda z: attend_read(z, heads, scale, strict=strict),
        lambda z: plain_attend_read(z, heads, scale, strict=strict),
    )


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("tokens", [2, 63, 145, 256])
@pytest.mark.parametrize(
    ("heads", "size"), [(3, 8), (1, 12), (4, 13), (4, 16), (3, 25), (4, 32), (1, 64), (3, 64)]
)
def test_attention_in_short_contexts(heads, size, tokens, strict):
    z = read_out(tokens, heads, size)
    assert dispatch.choose_attention(z, heads).fused
    compare_with_float64(*both_of_short_contexts(heads, size, strict), [z])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("size", [13, 16, 32, 64])
def test_attention_in_short_contexts_with_large_scores(size, strict):
    """Of standard deviation 36: where softmax is a maximum, but for ties."""
    z = read_out(145, 3, size, larger=6)
    compare_with_float64(*both_of_short_contexts(3, size, strict), [z])


def test_short_contexts_of_one_token():
    z = read_out(1, 3, 16)
    out = attend_read(z, 3, 0.25, strict=True)
    assert not out.any()
    (gradient,) = torch.autograd.grad(out.sum(), z)
    assert not gradient.any()
    compare_with_float64(*both_of_short_contexts(3, 16, False), [z])


def test_short_contexts_as_part_of_something():
    """Rows of a wider tensor, not aligned, and its columns."""
    wide = torch.randn(63, 3, 200, device="cuda").bfloat16()
    for z in (wide[..., 7:135].transpose(0, 1), wide[:, :2, :128].permute(1, 2, 0)[..., :48]):
        fused, plain = both_of_short_contexts(2, z.shape[-1] // 4, True)
        compare_with_float64(fused, plain, [z.requires_grad_()])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(63, 3, 13), (128, 4, 16), (145, 2, 32)])
def test_packed_attention_in_short_contexts(tokens, heads, size, strict):
    z = read_out(tokens, heads, size, runs=(4,))
    fused, plain = both_of_short_contexts(heads, size, strict)
    with dispatch.packed():
        compare_with_float64(torch.vmap(fused), torch.vmap(plain), [z])


@pytest.mark.parametrize("strict", [True, False])
def test_attention_in_short_contexts_can_be_differentiated_again(strict):
    z = read_out(63, 3, 13)
    second = []
    for function in both_of_short_contexts(3, 13, strict):
        with sdpa_kernel(SDPBackend.MATH):
            (first,) = torch.autograd.grad(function(z).sum(), z, create_graph=True)
            second.append(torch.autograd.grad(first.square().sum(), z)[0])
    assert relative(*second) < 5e-2


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize(
    ("rows", "left_width", "width"), [(1, 768, 6144), (64, 145, 126), (3, 5000, 2)]
)
def test_a_force_beside_other_numbers(rows, left_width, width, pair):
    together = torch.randn(rows, 1, left_width + width, device="cuda").bfloat16()
    left, z = together.split([left_width, width], dim=-1)
    found = force_beside(left, z, "gelu", pair=pair)
    plain = plain_pair_force if pair else plain_square_force
    assert torch.equal(found[..., :left_width], left)
    assert relative(found[..., left_width:].double(), plain(z.double(), "gelu")) < 1e-2


def test_forces_can_be_differentiated_again():
    z = torch.randn(2, 5, 6, device="cuda", requires_grad=True)
    for fused, plain in ((pair_force, plain_pair_force), (square_force, plain_square_force)):
        second = []
        for function in (fused, plain):
            (first,) = torch.autograd.grad(function(z, "gelu").sum(), z, create_graph=True)
            second.append(torch.autograd.grad(first.square().sum(), z)[0])
        assert relative(*second) < 1e-4


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("tokens", ODD)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("heads", "size", "shared"), [(4, 32, False), (2, 144, True), (3, 272, True)]
)
def test_attention(heads, size, shared, strict, tokens, dtype):
    q = torch.randn(2, heads, tokens, size, device="cuda").to(dtype).requires_grad_()
    k = torch.randn(2, 1 if shared else heads, tokens, size, device="cuda").to(dtype)
    k.requires_grad_()
    up = torch.randn_like(q)
    exact = [x.detach().double().cpu().requires_grad_() for x in (q, k)]
    found, expected = attend(q, k, 0.1, strict=strict), attend(*exact, 0.1, strict=strict)
    assert relative(found.double().cpu(), expected) < LARGEST[dtype]
    found = torch.autograd.grad(found, (q, k), up)
    expected = torch.autograd.grad(expected, exact, up.double().cpu())
    for ours, theirs in zip(found, expected, strict=True):
        assert relative(ours.double().cpu(), theirs) < LARGEST[dtype]


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("capacity", ODD)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("rows", "heads", "size", "shared"),
    [(1, 12, 64, False), (64, 12, 64, False), (3, 2, 63, True), (2, 12, 768, True)],
)
def test_attention_of_one_token(rows, heads, size, shared, strict, capacity, dtype):
    from nrgpt.kernels.triton_decoding import attend_one

    q = torch.randn(rows, 2 * heads * size, device="cuda").to(dtype)
    q = q[:, : heads * size].unflatten(-1, (heads, 1, size))
    kept = torch.randn(rows, 1 if shared else heads, capacity, size, device="cuda").to(dtype)
    last = torch.randint(capacity // 2, capacity, (rows, 1), device="cuda")
    found = attend_one(q, kept, last, 0.3, strict=strict)
    there = torch.arange(capacity, device="cuda")
    seen = (there < last if strict else there <= last)[:, None, None]
    scores = 0.3 * q.double() @ kept.double().mT
    p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    assert relative(found.double(), p @ kept.double()) < LARGEST[dtype]
    blind = attend_one(q, kept, torch.zeros_like(last), 0.3, strict=True)
    assert not blind.any()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("tokens", ODD)
def test_loss(tokens, dtype, monkeypatch):
    from nrgpt.kernels import loss as kernels

    monkeypatch.setattr(kernels, "CHUNK", 10)
    monkeypatch.setattr(kernels, "CHUNK_ON_GPU", 40 * 1003)
    h = torch.randn(2, tokens, 33, device="cuda").to(dtype).requires_grad_()
    head = torch.randn(1003, 33, device="cuda").to(dtype).requires_grad_()
    targets = torch.randint(1003, (2, tokens), device="cuda")
    targets[0, :5] = -100
    exact = [x.detach().double().requires_grad_() for x in (h, head)]
    expected = plain_loss(F.linear(*exact), targets)
    found = head_loss(h, head, None, targets)
    assert abs(found.item() - expected.item()) < LARGEST[dtype]
    for ours, theirs in zip(
        torch.autograd.grad(found, (h, head)), torch.autograd.grad(expected, exact), strict=True
    ):
        assert relative(ours.double(), theirs) < LARGEST[dtype]


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
@pytest.mark.parametrize("fields", [{}, {"feedforward": "ff1"}, {"coupling": "full"}], ids=str)
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
            assert dispatch.choose_feedforward(model.tokens).fused == (not kernels)
            assert dispatch.choose_attention(model.tokens, heads=2).fused == (not kernels)
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
        losses = [s(text[..., :-1], text[..., 1:], None, rates)[0] for s in (plain, recorded)]
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
            found, fine = step(text[..., :-1], text[..., 1:], None, rates)
            assert fine.all()
        losses.append(found)
    assert (losses[0] - losses[1]).abs().max() < 1e-2


def talkative(**fields):
    model = randomised(dataclasses.replace(SMALL, tied=False, **fields)).float().cuda()
    with torch.no_grad():
        model.tokens.mul_(5)
        model.positions.mul_(5)
    return model


@pytest.mark.parametrize("fields", [{}, {"mask": "inclusive"}, {"coupling": "full"}], ids=str)
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
