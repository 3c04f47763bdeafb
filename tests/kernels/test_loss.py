"""The chunked loss against the plain one."""

import pytest
import torch

from nrgpt.kernels import loss as kernels
from nrgpt.kernels.loss import ChunkedLoss, plain_loss
from tests.models import config, randomised, relative, tokens


def inputs(dtype=torch.float64, vocabulary=37, count=145):
    h = torch.randn(count, 9, dtype=dtype, requires_grad=True)
    head = torch.randn(vocabulary, 9, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocabulary, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (count,))
    targets[::7] = -100
    return h, head, bias, targets


@pytest.mark.parametrize("rows", [1, 63, 144, 145, 1_000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_value_and_gradients(rows, with_bias):
    h, head, bias, targets = inputs()
    wanted = (h, head, bias) if with_bias else (h, head)
    found = ChunkedLoss.apply(h, head, bias if with_bias else None, targets, rows)
    exact = plain_loss(h @ head.T + (bias if with_bias else 0), targets)
    assert abs(found.item() - exact.item()) < 1e-12
    upstream = torch.tensor(0.7, dtype=torch.float64)
    pairs = zip(
        torch.autograd.grad(found, wanted, upstream),
        torch.autograd.grad(exact, wanted, upstream),
        strict=True,
    )
    assert all(relative(ours, theirs) < 1e-12 for ours, theirs in pairs)


def test_in_bfloat16():
    """At most twice as far from the exact gradient as the plain loss in bfloat16."""
    h, head, bias, targets = inputs(torch.float32, vocabulary=1_000)
    exact = torch.autograd.grad(plain_loss(h @ head.T + bias, targets), (h, head, bias))
    errors = []
    for loss in (
        lambda: plain_loss(torch.nn.functional.linear(h, head, bias), targets),
        lambda: ChunkedLoss.apply(h, head, bias, targets, 63),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss()
        assert value.dtype == torch.float32
        found = torch.autograd.grad(value, (h, head, bias))
        errors.append([relative(a, b) for a, b in zip(found, exact, strict=True)])
    assert all(ours < 2 * plain + 1e-3 for plain, ours in zip(*errors, strict=True))


def test_without_gradients_none_is_computed(monkeypatch):
    asked = []

    def spy(logits, answer, weight, wants_gradient):
        asked.append(wants_gradient)
        return original(logits, answer, weight, wants_gradient)

    original = kernels.loss_and_error
    monkeypatch.setattr(kernels, "loss_and_error", spy)
    monkeypatch.setattr(kernels, "CHUNK", 30)
    h, head, bias, targets = inputs()
    exact = plain_loss(h @ head.T + bias, targets)
    with torch.no_grad():
        assert kernels.head_loss(h, head, bias, targets).item() == pytest.approx(exact.item())
    assert set(asked) == {False}
    asked.clear()
    kernels.head_loss(h, head, bias, targets).backward()
    assert set(asked) == {True}
    assert h.grad is not None


def test_of_the_last_tokens_only():
    model = randomised(config())
    idx, targets = tokens(model.cfg)
    logits, _ = model(idx)
    few, loss = model(idx, targets, last=3)
    assert torch.equal(few, logits[:, -3:])
    assert loss.item() == pytest.approx(plain_loss(logits[:, -3:], targets[:, -3:]).item())
    _, same = model(idx, targets, last=3, want_logits=False)
    assert same.item() == pytest.approx(loss.item())
    for wrong in (0, idx.shape[1] + 1):
        with pytest.raises(ValueError, match=f"last = {wrong}: must be in 1"):
            model(idx, last=wrong)


@pytest.mark.parametrize("fields", [{}, {"tied": False, "head_bias": True}])
def test_a_model_that_does_not_return_its_logits(fields, monkeypatch):
    model = randomised(config(**fields))
    idx, targets = tokens(model.cfg)
    _, plain = model(idx, targets)
    expected = torch.autograd.grad(plain, model.parameters())
    for chunk in (2**25, 30):
        monkeypatch.setattr(kernels, "CHUNK", chunk)
        logits, loss = model(idx, targets, want_logits=False)
        assert logits is None
        found = torch.autograd.grad(loss, model.parameters())
        assert abs(loss.item() - plain.item()) < 1e-12
        assert all(relative(a, b) < 1e-10 for a, b in zip(found, expected, strict=True))
    with torch.no_grad():
        assert abs(model(idx, targets, want_logits=False)[1].item() - plain.item()) < 1e-12


def test_it_compiles_into_one_graph(monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", 30)
    model = randomised(config())
    idx, targets = tokens(model.cfg)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _, loss = compiled(idx, targets, want_logits=False)
    _, exact = model(idx, targets)
    assert abs(loss.item() - exact.item()) < 1e-12
    expected = torch.autograd.grad(exact, model.parameters())
    found = torch.autograd.grad(loss, model.parameters())
    assert all(relative(a, b) < 1e-10 for a, b in zip(found, expected, strict=True))
