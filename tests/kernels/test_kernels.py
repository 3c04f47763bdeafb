"""The elementwise functions and attention against plain definitions."""

import pytest
import torch

from nrgpt.kernels import dispatch
from nrgpt.kernels.attention import SharedKeys, attend, logsumexp_scores
from nrgpt.kernels.plain import plain_attend_read
from nrgpt.kernels.pointwise import ACTIVATIONS, POTENTIALS

from ..models import relative


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_derivative(name):
    sigma = ACTIVATIONS[name]
    z = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)
    v = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(sigma.value(z), z, v)[0]
    assert relative(sigma.pull(v, z), expected) < 1e-12
    assert torch.autograd.gradcheck(sigma.pull, (v, z))


@pytest.mark.parametrize("name", POTENTIALS)
def test_potential_derivative_and_convexity(name):
    potential = POTENTIALS[name]
    z = torch.linspace(-40, 40, 9001, dtype=torch.float64, requires_grad=True)
    first = torch.autograd.grad(potential.value(z).sum(), z)[0]
    assert (first - potential.derivative(z)).abs().max() < 1e-12
    second = torch.autograd.grad(potential.derivative(z).sum(), z)[0]
    lowest = float(second.min())
    assert -potential.concave_by - 1e-12 <= lowest <= -potential.concave_by + 1e-4


@pytest.mark.parametrize("tokens", [1, 2, 7, 63, 145])
@pytest.mark.parametrize("strict", [True, False])
def test_attention_against_loops(tokens, strict):
    q = torch.randn(2, 3, tokens, 5, dtype=torch.float64)
    k = torch.randn(2, 3, tokens, 5, dtype=torch.float64)
    out, log_sum = torch.zeros_like(q), torch.zeros_like(q[..., 0])
    for A in range(tokens):
        seen = k[:, :, : A if strict else A + 1]
        if seen.shape[2]:
            scores = 0.7 * torch.einsum("bhy,bhny->bhn", q[:, :, A], seen)
            out[:, :, A] = torch.einsum("bhn,bhny->bhy", scores.softmax(-1), seen)
            log_sum[:, :, A] = scores.exp().sum(-1).log()
    assert (attend(q, k, 0.7, strict=strict) - out).abs().max() < 1e-12
    z = torch.cat([x.transpose(1, 2).flatten(-2) for x in (q, k)], dim=-1)
    side_by_side = plain_attend_read(z, 3, 0.7, strict=strict).unflatten(-1, (3, 5))
    assert (side_by_side.transpose(1, 2) - out).abs().max() < 1e-12
    assert (logsumexp_scores(q, k, 0.7, strict=strict) - log_sum).abs().max() < 1e-12


def test_transformations_are_noticed():
    """They would take a kernel's derivative to be zero."""
    seen = []

    def watched(x):
        seen.append(dispatch.is_transformed())
        return x.sum()

    x = torch.ones(3)
    watched(x)
    torch.func.grad(watched)(x)
    torch.func.jvp(watched, (x,), (x,))
    torch.func.vmap(watched)(x[None])
    with torch.autograd.forward_ad.dual_level():
        watched(x)
    with dispatch.packed():
        torch.func.vmap(watched)(x[None])
    assert seen == [False, True, True, True, True, False]


def test_what_is_chosen_is_said(monkeypatch):
    some = torch.zeros(1)
    fused, why = dispatch.choose(some)
    assert not fused
    assert "on cpu" in why
    assert dispatch.explain("cpu").count("plain") >= len(dispatch.OPERATIONS) + 1
    monkeypatch.setenv("NRGPT_KERNELS", "plain")
    assert dispatch.choose(some).why == "NRGPT_KERNELS=plain"
    monkeypatch.setenv("NRGPT_KERNELS", "plane")
    with pytest.raises(ValueError, match="'plane': must be 'plain'"):
        dispatch.choose(some)


@pytest.mark.parametrize("tokens", [7, 63, 300, 600])
@pytest.mark.parametrize("strict", [True, False])
def test_attention_by_tiles(tokens, strict):
    """The version for full-rank heads on a GPU: three heads share their keys."""
    z = torch.randn(2, tokens, 60, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 1, tokens, 20, dtype=torch.float64, requires_grad=True)
    q = z.unflatten(-1, (3, 20)).transpose(1, 2)
    found = SharedKeys.apply(q, k[:, 0], 0.3, strict)
    expected = attend(q, k, 0.3, strict=strict)
    assert relative(found, expected) < 1e-12
    up = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, (z, k), up),
        torch.autograd.grad(expected, (z, k), up),
        strict=True,
    ):
        assert relative(ours, theirs) < 1e-12
