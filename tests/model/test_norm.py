"""Norms against PyTorch's, their Jacobians against autograd, and the Jacobians' null spaces."""

import pytest
import torch

from nrgpt.model.norm import make_norm

from ..models import config, relative


def random_norm(kind, eps=1e-5):
    norm = make_norm(config(norm=kind, **({} if kind == "none" else {"norm_eps": eps}))).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return norm


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "none"])
def test_jacobian(kind, eps):
    norm = random_norm(kind, eps)
    x = torch.randn(2, 5, 9, dtype=torch.float64)
    expected = torch.func.vmap(torch.func.vmap(torch.func.jacrev(norm)))(x)
    assert relative(norm.jacobian(x), expected) < 1e-12


@pytest.mark.parametrize(("kind", "nullity"), [("layernorm", 2), ("rmsnorm", 1), ("none", 0)])
def test_null_space(kind, nullity):
    """With eps = 0: the token's own direction, and for LayerNorm the mean."""
    norm = random_norm(kind, eps=0.0)
    x = torch.randn(2, 5, 9, dtype=torch.float64)
    jacobian = norm.jacobian(x)
    singular = torch.linalg.svdvals(jacobian)
    assert ((singular < 1e-12 * singular[..., :1]).sum(-1) == nullity).all()
    null_directions = {"layernorm": [x, torch.ones_like(x)], "rmsnorm": [x], "none": []}[kind]
    for direction in null_directions:
        image = torch.einsum("bnij,bnj->bni", jacobian, direction)
        assert image.abs().max() < 1e-12 * singular.max() * direction.abs().max() * 9


@pytest.mark.parametrize("eps", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_projector_is_symmetric_and_positive(kind, eps):
    """P is positive semi-definite for every eps, and a projection where eps = 0."""
    norm = random_norm(kind, eps)
    x = torch.randn(2, 5, 9, dtype=torch.float64)
    P = norm.jacobian(x) * norm.scale(x).unsqueeze(-1) / norm.gamma[:, None]
    assert relative(P, P.mT) < 1e-12
    assert torch.linalg.eigvalsh(P).min() > -1e-12
    if eps == 0.0:
        assert relative(P @ P, P) < 1e-12
    v = torch.randn_like(x)
    assert relative(norm.project(x, v), torch.einsum("bnij,bnj->bni", P, v)) < 1e-12


def test_fixed_gamma_and_delta():
    norm = make_norm(config(), learn_gamma=False, learn_delta=False)
    assert not any(p.requires_grad for p in norm.parameters())
    assert len(list(norm.parameters())) == 2
