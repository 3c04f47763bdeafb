"""Curves of losses find what made them, and steps are worth the layers that they replace."""

import json
from pathlib import Path

import numpy as np
import pytest
from experiments.scaling import fit
from experiments.settled.one import config_of

from nrgpt.train.config import TrainConfig

TRUE = {"gpt": (2.0, 0.2), "settled": (1.7, 0.2)}
FLOPS = np.array([0.3, 1, 4, 20, 80]) * fit.UNIT


def made_points(noise=0.0):
    generator = np.random.default_rng(1)
    points = {}
    for name, (b, a) in TRUE.items():
        losses = 2.5 + b * (FLOPS / fit.UNIT) ** -a + noise * generator.standard_normal(5)
        points[name] = list(zip(FLOPS, losses, strict=True))
    return points


def test_curves_are_found_again():
    curves = fit.Curves(made_points())
    assert curves.p[0] == pytest.approx(2.5, abs=1e-3)
    for i, (b, a) in enumerate(TRUE.values()):
        assert curves.p[1 + 2 * i] == pytest.approx(a, abs=1e-3)
        assert np.exp(curves.p[2 + 2 * i]) == pytest.approx(b, abs=1e-3)
        ahead = curves.at(curves.p, np.log(1e3), i)
        assert ahead == pytest.approx(2.5 + b * 1e3**-a, abs=1e-3)


def test_intervals_grow_with_noise_and_hold_the_truth():
    widths = []
    for noise in (0.002, 0.02):
        curves = fit.Curves(made_points(noise))
        ahead = [curves.at(p, np.log(200.0), 0) for p in curves.resampled(60)]
        low, high = fit.interval(np.array(ahead))
        assert low < 2.5 + 2.0 * 200**-0.2 < high
        widths.append(high - low)
    assert widths[1] > 3 * widths[0]


def test_worth_in_layers():
    by_layers = {1: 4.0, 2: 3.6, 4: 3.3, 8: 3.2}
    assert fit.worth_in_layers(4.0, by_layers) == pytest.approx(1)
    assert fit.worth_in_layers(3.3, by_layers) == pytest.approx(4)
    assert fit.worth_in_layers(3.45, by_layers) == pytest.approx(2**1.5)
    assert fit.worth_in_layers(4.1, by_layers) is None
    assert fit.worth_in_layers(3.1, by_layers) is None


def test_tables_and_figure(tmp_path, monkeypatch):
    rows = [
        {"model": f"scale-{name}-w{i}", "training_flops": flops, "val_loss_full": loss, "steps": 12}
        for name, own in made_points(0.01).items()
        for i, (flops, loss) in enumerate(own)
    ]
    for model, steps, loss in (("gpt-1", 1, 4.0), ("gpt-4", 4, 3.0), ("settled-2", 2, 3.5)):
        rows.append({"model": f"depth-{model}", "steps": steps, "val_loss_full": loss})
    monkeypatch.setattr(fit, "rows_of", lambda folder: (rows, {}))
    monkeypatch.setattr(fit, "RESAMPLED", 20)
    fit.main(tmp_path)
    said = (tmp_path / "scaling.md").read_text()
    assert "| NRGPT, settled | 5 | 0." in said
    assert "| settled | 2 | 1 | 3.500 | 2.0 |" in said
    assert (tmp_path / "scaling.png").stat().st_size > 5_000
    assert len(json.loads((tmp_path / "scaling.json").read_text())["p"]) == 5


JOBS = Path(fit.__file__).parents[1]


@pytest.mark.parametrize("file", ["scaling/jobs.jsonl", "all_text/jobs.jsonl"])
def test_jobs_are_configurations(file, tmp_path):
    """Before they cost minutes of a GPU."""
    jobs = [json.loads(line) for line in (JOBS / file).read_text().splitlines()]
    assert len({job["name"] for job in jobs}) == len(jobs)
    for job in jobs:
        assert isinstance(config_of(job, tmp_path, tmp_path), TrainConfig)
