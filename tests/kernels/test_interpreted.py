"""Triton kernels on a CPU, by Triton's interpreter: slow, but the same code that a GPU runs.

It has to be chosen before triton is imported, so each test is a process of its own. Triton comes
with torch's builds for GPUs and is not in requirements.lock; `make kernels` fetches it.
"""

import sys
from importlib.util import find_spec

import pytest
import torch

from tests.processes import environment, finished

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton (290 MB): make kernels"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="with a GPU, test_cuda_kernels.py runs the kernels there"
    ),
]

FORCES = """
import torch
from nrgpt.kernels.plain import plain_pair_force, plain_square_force
from nrgpt.kernels.triton_force import force, launch_force
from tests.models import relative

for activation in ("gelu", "gelu_tanh", "relu"):
    for pair, plain in ((True, plain_pair_force), (False, plain_square_force)):
        for rows, width in ((3, 10), (7, 300)):
            z = torch.randn(2, rows, 2 * width + 5)[..., 3 : 3 + 2 * width].requires_grad_()
            exact = z.detach().double().requires_grad_()
            found, expected = force(z, activation, pair), plain(exact, activation)
            assert relative(found.double(), expected) < 1e-6
            up = torch.randn_like(found)
            (ours,) = torch.autograd.grad(found, z, up)
            (theirs,) = torch.autograd.grad(expected, exact, up.double())
            assert relative(ours.double(), theirs) < 1e-6
            left = torch.randn(2, rows, 4)
            beside = launch_force(z.detach(), None, activation, pair, left)
            assert torch.equal(beside[..., :4], left)
            assert torch.equal(beside[..., 4:], found.detach())
"""
LOSS = """
import torch
import torch.nn.functional as F
from nrgpt.kernels.triton_loss import cross_entropy_

for kinds in (5, 4096, 5000):
    logits = 3 * torch.randn(6, kinds)
    targets, weight = torch.randint(kinds, (6,)), torch.rand(6)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none") * weight
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    assert (cross_entropy_(logits, targets, weight, False) - expected).abs().max() < 1e-5
    assert (cross_entropy_(logits, targets, weight, True) - expected).abs().max() < 1e-5
    assert (logits - gradient).abs().max() < 1e-5
"""
ATTENTION = """
import torch
from nrgpt.kernels.plain import plain_attend_read
from nrgpt.kernels.triton_attention import attend_read
from tests.models import relative

for tokens, heads, size in ((1, 2, 8), (5, 2, 8), (70, 3, 13), (130, 1, 32)):
    for strict in (True, False):
        wide = torch.randn(2, tokens, 2 * heads * size + 5)
        z = wide[..., 3 : 3 + 2 * heads * size].requires_grad_()
        exact = z.detach().double().requires_grad_()
        found, _ = attend_read(z, heads, size**-0.5, strict)
        if strict:
            assert not found[:, 0].any()  # the first token sees nothing
        expected = plain_attend_read(exact, heads, size**-0.5, strict=strict)
        assert (found - expected).abs().max() < 1e-5
        up = torch.randn_like(found)
        (ours,) = torch.autograd.grad(found, z, up)
        if strict and tokens == 1:
            assert not ours.any()
            continue
        (theirs,) = torch.autograd.grad(expected, exact, up.double())
        assert relative(ours.double(), theirs) < 1e-6
"""
FEEDFORWARD = """
import torch
from nrgpt.kernels.plain import plain_feedforward
from nrgpt.kernels.triton_feedforward import feedforward
from tests.models import relative

for tokens, width, hidden, pair, bias, activation in (
    (5, 24, 20, True, True, "gelu"),
    (70, 12, 40, False, False, "relu"),
    (70, 64, 70, True, False, "gelu_tanh"),
    (7, 100, 33, False, True, "gelu"),
):
    rows = 2 * hidden if pair else hidden
    shapes = (tokens, width), (rows, width), (rows,) if bias else None, (rows, width)
    scales = 1, width**-0.5, 1, rows**-0.5
    inputs = [
        None if shape is None else (scale * torch.randn(2, *shape)).requires_grad_()
        for shape, scale in zip(shapes, scales)
    ]
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]

    def plain(g, R, b, back):
        return plain_feedforward(g, R, b, back.mT, activation, pair)

    found = feedforward(*inputs, activation, pair)
    expected = torch.vmap(plain, (0, 0, 0 if bias else None, 0))(*exact)
    assert relative(found.double(), expected) < 1e-6
    up = torch.randn_like(found)
    ours = torch.autograd.grad(found, [x for x in inputs if x is not None], up)
    theirs = torch.autograd.grad(expected, [x for x in exact if x is not None], up.double())
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a.double(), b) < 2e-6
"""
DECODING = """
import torch
from nrgpt.kernels.triton_decoding import attend_one, keep_one
from tests.models import relative

for rows, heads, size, shared, capacity in (
    (2, 3, 8, False, 7), (1, 2, 13, True, 300), (3, 2, 63, False, 145),
):
    for strict in (True, False):
        q = torch.randn(rows, 2 * heads * size)[:, : heads * size].unflatten(-1, (heads, 1, size))
        kept = torch.randn(rows, 1 if shared else heads, capacity, size)
        last = torch.randint(capacity // 2, capacity, (rows, 1))
        found = attend_one(q, kept, last, 0.3, strict=strict)
        there = torch.arange(capacity)
        seen = (there < last if strict else there <= last)[:, None, None]
        scores = 0.3 * q.double() @ kept.double().mT
        p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        assert relative(found.double(), p @ kept.double()) < 1e-6
    assert not attend_one(q, kept, torch.zeros_like(last), 0.3, strict=True).any()
    keys = torch.randn(rows, kept.shape[1], 1, size)
    expected = kept.clone()
    for row, place in enumerate(last[:, 0]):
        expected[row, :, place] = keys[row, :, 0]
    keep_one(kept, keys, last)
    assert torch.equal(kept, expected)
"""
CODES = {
    "forces": FORCES,
    "loss": LOSS,
    "attention": ATTENTION,
    "feedforward": FEEDFORWARD,
    "decoding": DECODING,
}


@pytest.mark.parametrize("name", CODES)
def test_kernels_equal_their_plain_versions(name):
    env = {**environment(), "TRITON_INTERPRET": "1"}
    code = "import torch; torch.manual_seed(0)\n" + CODES[name]
    done = finished([sys.executable, "-c", code], env=env)
    assert done.returncode == 0, done.stderr
