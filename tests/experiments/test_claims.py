"""What docs/results.md claims to have reached, against the records of the runs."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from nrgpt import LanguageModel
from nrgpt.reproduce import common, records, tables
from nrgpt.reproduce.listops import transition_of

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
RESULTS = (EXPERIMENTS.parent / "docs" / "results.md").read_text()


def test_shakespeare_below_a_quarter_of_a_million():
    folder = EXPERIMENTS / "shakespeare_small"
    rows = common.read_rows(folder)
    results = [record.read("result.json") for record in records.read(folder).values()]
    assert [row["val_loss_full"] for row in rows] == [r["val_loss_full"] for r in results]
    assert len(rows) == 5
    assert np.mean([row["val_loss_full"] for row in rows]) <= 1.47
    assert max(row["parameters_untied"] for row in rows) <= 250_000
    assert (folder / "summary.md").read_text() in (folder / "README.md").read_text()


def certified(part):
    """Losses of the certified models of one size, checked against their own result files."""
    folder = EXPERIMENTS / "shakespeare"
    rows = [
        row
        for row in common.read_rows(folder)
        if (row["part"], row["model"]) == (part, "nrgpt_certified")
    ]
    kept = records.read(folder)
    for row in rows:
        result = kept[row["case"]].read("result.json")
        assert row["val_loss_full"] == result["val_loss_full"]
        assert row["certificate"]
        assert row["packed"] == 1  # trained by compiled gradients that are right
    assert sorted(row["seed"] for row in rows) == [0, 1, 2]
    return rows, np.array([row["val_loss_full"] for row in rows])


def test_certified_models():
    rows, losses = certified("ours_wide")
    assert max(row["parameters_untied"] for row in rows) <= 1_000_000
    assert losses.mean() <= 1.44
    assert f"**{losses.mean():.3f} ± {losses.std(ddof=1):.3f}**" in RESULTS
    rows, losses = certified("ours_small")
    assert max(row["parameters_untied"] for row in rows) <= 250_000
    best = np.array(
        [r["val_loss_full"] for r in common.read_rows(EXPERIMENTS / "shakespeare_small")]
    )
    behind = losses.mean() - best.mean()
    error = np.hypot(*(x.std(ddof=1) / len(x) ** 0.5 for x in (losses, best)))
    assert behind <= 0.02
    assert f"**{behind:.3f} ± {error:.3f} behind**" in RESULTS


def test_listops_transition():
    rows = [
        row
        for row in common.read_rows(EXPERIMENTS / "listops")
        if (row["modulus"], row["answers"], row["model"]) == (10, "steps", "ff2w")
    ]
    found = transition_of(rows)
    assert found.parameters <= 12_000
    assert f"**{found.parameters:,.0f}**" in RESULTS
    assert min(len(own) for own in tables.grouped(rows, "width").values()) == 3


def test_text_at_equal_parameters():
    folder = EXPERIMENTS / "text"
    rows, kept = common.read_rows(folder), records.read(folder)
    gpt, ours, narrow = (
        {row["seed"]: row for row in rows if row["model"] == name}
        for name in ("GPT", "NRGPT FF2W, as many parameters", "NRGPT FF2W")
    )
    assert gpt.keys() == ours.keys() == narrow.keys()
    behind = [narrow[seed]["val_loss_full"] - gpt[seed]["val_loss_full"] for seed in gpt]
    assert f"{np.mean(behind):.3f} behind at equal width" in RESULTS
    ahead = [gpt[seed]["val_loss_full"] - ours[seed]["val_loss_full"] for seed in sorted(gpt)]
    assert np.mean(ahead) >= -0.05
    for said in ((folder / "README.md").read_text(), RESULTS):
        assert f"**{np.mean(ahead):.3f}**" in said
        for number in ahead:
            assert f"{number:.3f}" in said
    for seed, row in gpt.items():
        assert ours[seed]["tokens"] == row["tokens"]
        assert ours[seed]["parameters_tied"] < 1.03 * row["parameters_tied"]
        configs = [kept[one["case"]].read("config.json") for one in (row, ours[seed])]
        for name in ("data", "batch", "seed", "iterations"):  # the same tokens in the same order
            assert configs[0][name] == configs[1][name]
    for row in rows:
        result = kept[row["case"]].read("result.json")
        assert result["val_loss_full"] == row["val_loss_full"]
    steps = EXPERIMENTS / "text_steps"
    assert (steps / "summary.md").read_text().strip() in (steps / "README.md").read_text()


@pytest.mark.parametrize("name", ["levers", "text_levers"])
def test_scripts_still_make_what_is_on_record(name):
    """They begin from presets, which may change."""
    script = importlib.import_module(f"experiments.{name}.{name}")
    for line in (EXPERIMENTS / name / "results.jsonl").read_text().splitlines():
        row = json.loads(line)
        kind = script.OTHER_MODELS.get(row["lever"], LanguageModel)
        with torch.device("meta"):
            model = kind(script.configuration(row["lever"], row["seed"]).model)
        learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert learned == row["parameters"], row["lever"]


def test_settled_models_of_text():
    lines = (EXPERIMENTS / "settled" / "text.jsonl").read_text().splitlines()
    found = {}
    for line in map(json.loads, lines):
        found.setdefault(line["name"].removeprefix("text-"), {}).update(line)
    loss = {name: run["disjoint_windows"]["loss"] for name, run in found.items()}
    ours = np.array([loss["settled-s0"], loss["settled-s1"]])
    assert found["settled-s0"]["parameters"] <= 75_000_000
    assert f"{loss['gpt-s0'] - ours.mean():.3f} ahead of a GPT" in RESULTS
    behind = np.mean([loss[f"moving-s{s}"] - loss[f"rgpt_parallel-s{s}"] for s in (0, 1)])
    assert f"the cone costs {behind:.3f}" in RESULTS
    for name in ("settled-s0", "settled-s1", "wide-s0"):
        rises = found[name]["rises"]
        assert rises["pairs"] > 1_000_000
        assert rises["rises"] == 0 > rises["largest"]
        assert found[name]["certificate"].startswith("proved: no step raises an energy in the for")
        by_steps = found[name]["losses_by_steps"]
        trained = "8" if name == "wide-s0" else "12"
        assert by_steps[str(2 * int(trained))] - by_steps[trained] < 0.01
