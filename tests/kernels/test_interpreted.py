"""Triton kernels on a CPU, by Triton's interpreter: slow, but the same code that a GPU runs.

It has to be chosen before triton is imported, so each test is a process of its own.
"""

import sys
from importlib.util import find_spec

import pytest
import torch

from tests.processes import environment, finished

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="needs triton (pip install triton, 290 MB)"
    ),
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


@pytest.mark.parametrize("code", [FORCES, LOSS], ids=["forces", "loss"])
def test_kernels_equal_their_plain_versions(code):
    env = {**environment(), "TRITON_INTERPRET": "1"}
    done = finished([sys.executable, "-c", "import torch; torch.manual_seed(0)\n" + code], env=env)
    assert done.returncode == 0, done.stderr
