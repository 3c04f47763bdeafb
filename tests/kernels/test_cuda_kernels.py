"""The GPU kernels against the plain versions. Skipped without a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nrgpt.kernels import dispatch
from nrgpt.kernels.attention import attend, attend_read
from nrgpt.kernels.feedforward import feedforward, force_beside, pair_force, square_force
from nrgpt.kernels.loss import head_loss, plain_loss
from nrgpt.kernels.plain import (
    plain_attend_read,
    plain_feedforward,
    plain_pair_force,
    plain_square_force,
)
from tests.cases import NEEDS_GPU
from tests.models import relative

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_GPU)

ODD = (63, 145, 1000)
LARGEST = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""The largest relative error against float64, by precision."""


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


def assert_like_float64(fused, plain, inputs, most=LARGEST[torch.bfloat16]):
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
    assert dispatch.choose_small(inputs[0]).fused
    assert_like_float64(
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
        assert_like_float64(torch.vmap(fused, dims), torch.vmap(plain, dims), inputs)


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
    """Queries and keys in bfloat16, side by side as in z."""
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
    assert dispatch.choose_small(z).fused
    assert_like_float64(*both_of_short_contexts(heads, size, strict), [z])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("size", [13, 16, 32, 64])
def test_attention_in_short_contexts_with_large_scores(size, strict):
    """Of standard deviation 36: where softmax is a maximum, but for ties."""
    z = read_out(145, 3, size, larger=6)
    assert_like_float64(*both_of_short_contexts(3, size, strict), [z])


def test_short_contexts_of_one_token():
    z = read_out(1, 3, 16)
    out = attend_read(z, 3, 0.25, strict=True)
    assert not out.any()
    (gradient,) = torch.autograd.grad(out.sum(), z)
    assert not gradient.any()
    assert_like_float64(*both_of_short_contexts(3, 16, False), [z])


def test_short_contexts_as_part_of_something():
    """Rows of a wider tensor, not aligned, and its columns."""
    wide = torch.randn(63, 3, 200, device="cuda").bfloat16()
    for z in (wide[..., 7:135].transpose(0, 1), wide[:, :2, :128].permute(1, 2, 0)[..., :48]):
        fused, plain = both_of_short_contexts(2, z.shape[-1] // 4, True)
        assert_like_float64(fused, plain, [z.requires_grad_()])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(63, 3, 13), (128, 4, 16), (145, 2, 32)])
def test_packed_attention_in_short_contexts(tokens, heads, size, strict):
    z = read_out(tokens, heads, size, runs=(4,))
    fused, plain = both_of_short_contexts(heads, size, strict)
    with dispatch.packed():
        assert_like_float64(torch.vmap(fused), torch.vmap(plain), [z])


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
    with torch.no_grad():
        assert head_loss(h, head, None, targets).item() == pytest.approx(found.item(), rel=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(found, (h, head)), torch.autograd.grad(expected, exact), strict=True
    ):
        assert relative(ours.double(), theirs) < LARGEST[dtype]
