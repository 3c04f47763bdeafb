"""The comparison with the neighbours is a fair one, and fixed points have the gradient they say."""

import dataclasses

import pytest
import torch
from experiments.neighbours.fixed_point import asymmetries, conjugate_gradients, make
from experiments.neighbours.models import JOBS, MASKED, SIZES, config

from nrgpt import LanguageModel, ModelConfig
from nrgpt.model.flops import flops_per_token


def shapes_of(name, size):
    cfg = config(name, size=size)
    with torch.device("meta"):
        return cfg.model, LanguageModel(cfg.model).parameter_counts().total


@pytest.mark.parametrize("size", SIZES)
def test_equal_parameters_and_equal_flops(size):
    _, wanted = shapes_of("gpt", size)
    for name in set(JOBS) - {"gpt_flops"}:
        _, found = shapes_of(name, size)
        assert found == pytest.approx(wanted, rel=0.07), name
    ebt = flops_per_token(config("ebt", size=size).model)
    for name in ("gpt_flops", "nrgpt_flops"):
        assert flops_per_token(config(name, size=size).model) == pytest.approx(ebt, rel=0.08), name


def test_all_are_trained_alike():
    fields = [dataclasses.replace(config(name), model=ModelConfig()) for name in JOBS]
    plain = [dataclasses.replace(cfg, objective="next") for cfg in fields]
    assert all(cfg == plain[0] for cfg in plain)
    masked = {name for name, cfg in zip(JOBS, fields, strict=True) if cfg.objective == "masked"}
    assert masked == set(MASKED)


def fixed_points(unrolled):
    outer = ModelConfig(vocab_size=7, context=6, width=8, heads=2, steps=1, block="gpt")
    torch.manual_seed(0)
    model = make(outer, 8, unrolled).double()
    with torch.no_grad():
        for parameter in model.block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.tolerance = 1e-13
    return model


def test_the_implicit_gradient_is_the_unrolled_ones_limit():
    idx, targets = torch.randint(7, (2, 6)), torch.randint(7, (2, 6))
    found = []
    for unrolled in (None, 60, 1):
        model = fixed_points(unrolled)
        model(idx, targets)[1].backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    implicit, limit, early = found
    assert implicit.keys() == limit.keys()
    size = torch.stack([g.norm() for g in limit.values()]).norm()
    for name, gradient in limit.items():
        assert (implicit[name] - gradient).norm() < 1e-9 * size, name
    assert max((early[n] - g).norm() for n, g in limit.items()) > 1e-3 * size


def test_only_a_field_without_norm_in_a_settled_past_is_a_gradient():
    found = asymmetries()
    assert found.pop("settled, no norm") < 1e-12
    assert min(found.values()) > 0.1


def test_conjugate_gradients_solve_each_token_and_stop_where_nothing_is_convex():
    root = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    A = root.mT @ root + torch.eye(5)
    b = torch.randn(2, 3, 5, dtype=torch.float64)
    u, number, left = conjugate_gradients(lambda v: (A @ v[..., None])[..., 0], b, 1e-10, 50)
    assert (A @ u[..., None])[..., 0].allclose(b)
    assert number <= 7
    assert left < 1e-10
    u, number, left = conjugate_gradients(lambda v: -v, b, 1e-10, 50)
    assert (number, left) == (1, pytest.approx(1))
    assert not u.any()
