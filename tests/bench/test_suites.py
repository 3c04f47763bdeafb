"""The benchmark measures what it says: its baselines compute the same, its tables are whole."""

import json

import pytest
import torch
from typer.testing import CliRunner

from nrgpt import LanguageModel, ModelConfig
from nrgpt.bench import SUITES, measure, settling, suites
from nrgpt.bench.textbook import autograd_model, textbook_model
from nrgpt.cli import app
from tests.models import relative

TINY = ModelConfig(vocab_size=11, context=9, width=8, heads=2, steps=2)


@pytest.mark.parametrize("make", [textbook_model, autograd_model])
def test_autograd_inside_computes_the_same(make):
    by_hand, other = LanguageModel(TINY).double(), make(TINY).double()
    other.load_state_dict(by_hand.state_dict())
    idx = torch.randint(11, (2, 9))
    losses = [model(idx, idx)[1] for model in (by_hand, other)]
    assert abs(losses[0].item() - losses[1].item()) < 1e-12
    ours, theirs = (
        torch.autograd.grad(loss, model.parameters())
        for loss, model in zip(losses, (by_hand, other), strict=True)
    )
    assert all(relative(a, b) < 1e-9 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("make", "times"), [(textbook_model, 1), (autograd_model, 2)])
def test_autograd_is_inside_of_every_step(make, times, monkeypatch):
    calls, grad = [], torch.func.grad
    monkeypatch.setattr(torch.func, "grad", lambda f: calls.append(f) or grad(f))
    make(TINY)(torch.randint(11, (2, 9)))
    assert len(calls) == times * TINY.steps


def test_every_suite_runs_and_writes_its_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    monkeypatch.setattr(measure, "matrix_product_rate", lambda device, precision: 1e9)
    small = lambda **fields: ModelConfig(**{**fields, "width": 8, "heads": 2, "steps": 2})  # noqa: E731
    monkeypatch.setattr(suites, "ModelConfig", small)
    monkeypatch.setattr(settling, "ModelConfig", small)
    options = ["--device", "cpu", "--to", str(tmp_path), "--profile"]
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 0, result.output
    for suite in SUITES:
        for report in json.loads((tmp_path / f"{suite}.json").read_text()):
            assert report["machine"]["torch"] == torch.__version__
            assert len(report["rows"]) >= 3
            assert all(row["low"] <= row["seconds"] <= row["high"] for row in report["rows"])
    assert (tmp_path / "trace.json").stat().st_size > 1_000
    assert "aten::" in result.output


def test_a_step_whose_loss_rises_first_is_timed():
    """As that of a large gpt without warm-up does, on the sizes of a GPU."""
    losses = iter([10.98, 12.0, 13.0, 12.8, 12.47])
    suites.check_that_gradients_arrive(lambda: torch.tensor(next(losses)))
    with pytest.raises(RuntimeError, match="has no gradient"):
        suites.check_that_gradients_arrive(lambda: torch.tensor(10.98))
    with pytest.raises(RuntimeError, match="to nan"):
        suites.check_that_gradients_arrive(lambda: torch.tensor(torch.nan))


def test_a_step_without_a_gradient_is_not_timed(monkeypatch):
    """Though weight decay changes its loss a little."""
    cpu = torch.device("cpu")
    assert suites.Step(LanguageModel(TINY), 3, cpu).work().tokens == 27
    step = suites.Step(LanguageModel(TINY), 3, cpu)
    loss = step.loss
    monkeypatch.setattr(step, "loss", lambda: loss().detach() + 0 * loss())
    with pytest.raises(RuntimeError, match="has no gradient"):
        step.work()
    assert suites.RecordedStep(TINY, 3, cpu, runs=2).work().tokens == 54
    packed = suites.RecordedStep(TINY, 3, cpu, runs=2)
    update = packed.step.optimise
    monkeypatch.setattr(packed.step, "optimise", lambda g, *rest: update(0 * g, *rest))
    with pytest.raises(RuntimeError, match="has no gradient"):
        packed.work()


def test_recomputing_steps_keeps_memory_from_growing_with_them():
    kept = {}
    for recompute in (False, True):
        for steps in (4, 16):
            model = LanguageModel(ModelConfig(**{**vars(TINY), "steps": steps}))
            model.checkpoint_steps = recompute
            step = suites.Step(model, 3, torch.device("cpu"))
            kept[recompute, steps] = suites.kept_bytes(step)
    per_state = 3 * 9 * 8 * 4  # what must be kept of a step: the state it starts from
    assert kept[True, 16] - kept[True, 4] == 12 * per_state
    assert kept[False, 16] - kept[False, 4] > 10 * 12 * per_state
