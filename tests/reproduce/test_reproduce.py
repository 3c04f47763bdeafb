"""nrgpt reproduce: cases of the sizes that the paper states, and every experiment end to end."""

import dataclasses
import json
import os
import shutil
import signal

import numpy as np
import pytest
from typer.testing import CliRunner

from nrgpt.cli import app
from nrgpt.reproduce import (
    common,
    energy,
    flops,
    listops,
    records,
    sensitivity,
    shakespeare,
    tables,
    training,
    variants,
)
from nrgpt.reproduce.fit import find_transition, interpolated
from nrgpt.train.faults import DIVERGED, INTERRUPTED, Interrupt, TrainingError
from nrgpt.train.runs import differences
from nrgpt.train.speed import counted_flops_per_token
from tests.cases import TINY, tiny
from tests.runs import debug

TINY_LISTOPS = (*TINY, "data.listops.train=500", "data.listops.test=5")
SIZES = 10 ** np.linspace(3, 6, 16)


def accuracies(floor, slope, middle, noise, seeds=3, seed=0):
    generator = np.random.default_rng(seed)
    means = floor + (1 - floor) / (1 + np.exp(-slope * (np.log10(SIZES) - middle)))
    return {
        int(size): list(mean + noise * generator.standard_normal(seeds))
        for size, mean in zip(SIZES, means, strict=True)
    }


@pytest.mark.parametrize(("floor", "slope", "middle"), [(0.1, 6, 4.2), (0.3, 12, 4), (0.01, 3, 5)])
def test_the_fit_finds_a_known_transition(floor, slope, middle):
    truth = 10 ** (middle + np.log((0.8 - floor) / 0.2) / slope)
    found = find_transition(accuracies(floor, slope, middle, noise=0))
    assert found.parameters == pytest.approx(truth, rel=0.01)
    assert found.interval == pytest.approx((truth, truth), rel=0.01)
    assert found.curve(np.array([truth])) == pytest.approx([0.8], abs=0.002)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    truth = 10 ** (4.3 + np.log(0.6 / 0.2) / 8)
    hits = 0
    for seed in range(20):
        low, high = find_transition(accuracies(0.2, 8, 4.3, noise=0.05, seed=seed)).interval
        assert low < high < 1.5 * low
        hits += low <= truth <= high
    assert hits >= 16


def test_one_seed_is_not_taken_for_certain():
    several = accuracies(0.2, 8, 4.3, noise=0.05)
    first = {size: own if size < 10**4 else own[:1] for size, own in several.items()}
    low, high = find_transition(first).interval
    assert high / low > 1.05
    assert find_transition({size: own[:1] for size, own in several.items()}).interval[0] > 0


def test_interpolation_needs_no_curve():
    found = {1_000: [0.2, 0.4], 10_000: [0.7, 0.7], 100_000: [0.9], 1_000_000: [0.75]}
    assert interpolated(found) == pytest.approx(10**4.5)
    assert interpolated({1_000: [0.9], 10_000: [0.5], 100_000: [0.6]}) == 0
    assert interpolated({1_000: [0.1], 10_000: [0.5]}) == np.inf


def test_a_level_that_is_never_or_always_reached_is_not_made_up():
    low, high = ({int(size): [value] * 3 for size in SIZES} for value in (0.2, 1.0))
    assert str(find_transition(low)) == "not reached"
    assert str(find_transition(high)) == "below all"
    # What levels off below it: the curve, which goes up to 1, crosses the level all the same.
    flat = {int(size): [min(0.78, 0.4 * np.log10(size) - 1.1)] * 3 for size in SIZES}
    found = find_transition(flat)
    assert found.curve(SIZES)[-1] > 0.8
    assert str(found) == "not reached"
    with pytest.raises(ValueError, match="3 sizes"):
        find_transition({100: [0.5], 200: [0.9]})


def test_listops_has_the_papers_sizes():
    cases = listops.cases("paper")
    assert len(cases) == 16 * 5 * 2 * 2 * 3
    assert len({case.name for case in cases}) == len(cases)
    cfg = cases[0].cfg
    assert (cfg.model.steps, cfg.model.heads, cfg.iterations, cfg.batch) == (5, 1, 100_000, 64)
    assert {c.cfg.model.width for c in cases} >= {8, 51, 256}
    assert {c.cfg.data.listops.modulus for c in cases} == {10, 20}
    assert {c.cfg.model.feedforward for c in cases} == {"ff1", "ff2w", "ff2"}
    assert all(c.cfg.model.coupling == "full" for c in cases if c.cfg.model.block == "nrgpt")
    ours = {case.cfg.model.width for case in listops.cases("ours")}
    assert len(ours) == 15
    assert min(ours) == 8
    assert max(ours) == 256


def test_listops_end_to_end(tmp_path, monkeypatch, capsys):
    cases = [c for c in listops.cases(quick=True, seeds=2) if "-steps-ff2w" in c.name]
    cases = tiny(cases, TINY_LISTOPS)
    assert len(cases) == 6
    files = listops.reproduce(cases, tmp_path / "to")
    assert [file.name for file in files] == ["transition-ours-mod10-steps.png", "transitions.md"]
    assert files[0].stat().st_size > 5_000
    assert "NRGPT FF2W | not reached" in files[1].read_text()
    rows = common.read_rows(tmp_path / "to")
    assert len(rows) == 6
    row = rows[0]
    assert row["parameters"] == row["parameters_tied"] < row["parameters_untied"]
    counted = counted_flops_per_token(cases[0].cfg.model, cases[0].cfg.batch)
    assert row["training_flops"] == pytest.approx(counted * row["tokens"])
    assert row["seconds"] > 0
    assert (row["packed"], row["total"], row["answers"]) == (2, 5, "steps")
    assert records.read(tmp_path / "to")[row["case"]].files.keys() == {
        "config.json", "environment.json", "metrics.jsonl", "result.json", "samples.txt",
    }  # fmt: skip

    # What is on record is neither trained nor written again, even if the run folders are gone.
    monkeypatch.setattr(training, "train_pack", lambda *_: pytest.fail("trained again"))
    monkeypatch.chdir(tmp_path / "to")
    assert listops.reproduce(cases, tmp_path / "to") == files
    files[0].unlink()
    assert listops.reproduce([], tmp_path / "to", plots_only=True) == files
    assert files[0].exists()
    assert common.read_rows(tmp_path / "to") == rows
    with pytest.raises(ValueError, match=r"another configuration \(iterations: 4 -> 5"):
        listops.reproduce(tiny(cases, ["iterations=5"]), tmp_path / "to")
    with pytest.raises(ValueError, match="leave out --plots-only"):
        listops.reproduce([], tmp_path / "empty", plots_only=True)

    # A record from before a field was there stands for its default.
    record = records.read(tmp_path / "to")[cases[0].name]
    fields = record.read("config.json")
    assert fields["model"].pop("alpha_init") == 1
    record.files["config.json"] = json.dumps(fields).encode()
    records.put(tmp_path / "to", {cases[0].name: record})
    assert listops.reproduce(cases, tmp_path / "to") == files
    changed = tiny(cases, ["model.alpha_init=4"])
    with pytest.raises(ValueError, match=r"model.alpha_init: 1.0 -> 4"):
        listops.reproduce(changed, tmp_path / "to")


def debug_cases(*overrides, seeds=2):
    cfg = debug("iterations=6", "eval_every=6", "data.listops.test=5", *overrides)
    return [
        common.Case(f"s{seed}", dataclasses.replace(cfg, seed=seed), {"model": "debug"})
        for seed in range(seeds)
    ]


def test_an_interrupted_experiment_goes_on(tmp_path, monkeypatch):
    """The second run is stopped; only it is trained again, and a finished one without a record
    is recorded."""
    original, calls = training.train, []

    def stops(cfg, run):
        calls.append(run.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(cfg, run)

    monkeypatch.setattr(training, "train", stops)
    monkeypatch.setattr(training, "can_be_packed", lambda *_: False)
    with pytest.raises(KeyboardInterrupt):
        common.carry_out(debug_cases(), tmp_path / "to")
    rows = common.carry_out(debug_cases(), tmp_path / "to")
    assert calls == ["s0", "s1", "s1"]
    assert [row["case"] for row in rows] == ["s0", "s1"]


def wide_cases():
    return [dataclasses.replace(c, name=f"w{c.name}") for c in debug_cases("model.width=32")]


def test_a_signal_at_the_end_of_a_run_is_not_forgotten(tmp_path, monkeypatch):
    """The run finishes; what comes after it waits for the next call."""
    original, calls = training.train, []

    def ends(cfg, run):
        calls.append(run.name)
        with Interrupt().watching():  # as every training has it
            original(cfg, run)
            if len(calls) <= 2:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(training, "train", ends)
    monkeypatch.setattr(training, "can_be_packed", lambda *_: False)
    cases = [*debug_cases(), *wide_cases()[:1]]
    for finished in (["s0"], ["s0", "s1"]):  # within a pack of two, then between two packs
        with pytest.raises(TrainingError, match="SIGTERM: all is saved") as stopped:
            common.carry_out(cases, tmp_path / "to")
        assert stopped.value.code == INTERRUPTED
        assert calls == finished
    assert [row["case"] for row in common.carry_out(cases, tmp_path / "to")] == ["s0", "s1", "ws0"]
    assert calls == ["s0", "s1", "ws0"]


def test_two_calls_may_write_into_one_folder(tmp_path):
    other = "of another process"

    def meanwhile(case, run, record):
        records.put(tmp_path / "to", {other: records.Record({})})
        common.put_rows(tmp_path / "to", [{"case": other, "seed": 0}])
        return {}

    rows = common.carry_out(debug_cases(seeds=1), tmp_path / "to", meanwhile)
    assert [row["case"] for row in rows] == [other, "s0"]
    assert list(records.read(tmp_path / "to")) == [other, "s0"]


def test_a_record_that_was_removed_is_made_again(tmp_path):
    common.carry_out(debug_cases(seeds=1), tmp_path / "to")
    other = debug_cases("iterations=8", "eval_every=8", seeds=1)
    run = tmp_path / "runs" / "reproduce" / "to" / "s0"
    with pytest.raises(ValueError, match=r"s0 in .*to is of another config"):
        common.carry_out(other, tmp_path / "to")
    assert CliRunner().invoke(records.app, ["remove", str(tmp_path / "to"), "s0"]).exit_code == 0
    with pytest.raises(ValueError, match="to/s0 is of another config"):
        common.carry_out(other, tmp_path / "to")
    shutil.rmtree(run)
    (row,) = common.carry_out(other, tmp_path / "to")
    assert row["iterations"] == 8
    calls = (tmp_path / "to" / "wall_time.jsonl").read_text().splitlines()
    assert len(calls) == 2  # what was refused took none


@pytest.mark.parametrize("line", ['{"case": "s1", "se', "5", '{"seed": 1}', "\xff"])
def test_a_damaged_row_is_named(tmp_path, line):
    text = '{"case": "s0"}\n' + line + "\n"
    (tmp_path / "results.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"results\.jsonl, line 2: no row .* delete this line"):
        common.carry_out(debug_cases(), tmp_path)


def test_a_run_that_diverges_is_a_row_without_a_loss(tmp_path, monkeypatch):
    def diverges(cfg, run):
        (run / "environment.json").write_text('{"commit": null, "gpu": null}')
        (run / "metrics.jsonl").write_text("")
        raise TrainingError("iteration 3: loss nan", DIVERGED)

    case = debug_cases(seeds=1)
    monkeypatch.setattr(training, "train", diverges)
    run = tmp_path / "runs" / "reproduce" / "to" / "s0"
    run.mkdir(parents=True)
    (row,) = common.carry_out(case, tmp_path / "to")
    assert row["error"] == "iteration 3: loss nan"
    assert tables.grouped([row], "model") == {}
    assert "s0" in tables.failures([row])
    assert common.carry_out(case, tmp_path / "to") == [row]


def test_packs_share_a_shape_and_fit_a_gpu():
    cases = debug_cases(seeds=3)
    runs = [(case.cfg, case.name) for case in [*cases, *wide_cases()]]
    assert [len(pack) for pack in training.packs_of(runs)] == [3, 2]
    large = debug_cases("batch=512", "model.context=4096", "model.width=64")
    assert [len(pack) for pack in training.packs_of([(c.cfg, c.name) for c in large])] == [1, 1]


def test_several_processes(tmp_path):
    """What a pack says is in its first run's folder."""
    rows = common.carry_out([*debug_cases(), *wide_cases()], tmp_path / "to", processes=2)
    assert {row["case"]: row["width"] for row in rows} == {"s0": 16, "s1": 16, "ws0": 32, "ws1": 32}
    first = tmp_path / "runs" / "reproduce" / "to" / "ws0"
    assert "evaluating" in (first / "output.txt").read_text()
    entry = json.loads((tmp_path / "to" / "wall_time.jsonl").read_text())
    assert (entry["runs"], entry["processes"]) == (4, 2)


def test_the_command_line(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(listops, "reproduce", lambda cases, to, **_: seen.append((cases, to)) or [])
    runner = CliRunner()
    options = ["--only", "mod20-direct-ff1-8d-w64,mod10-steps-ff2w-w8-", "--seeds", "4"]
    done = runner.invoke(app, ["reproduce", "listops", *options, "iterations=200"])
    assert done.exit_code == 0, done.output
    ((cases, to),) = seen
    assert len(cases) == 8
    assert {case.cfg.iterations for case in cases} == {200}
    assert str(to) == "experiments/listops"
    assert runner.invoke(app, ["reproduce", "listops", "--only", "nothing"]).exit_code == 2
    assert runner.invoke(app, ["reproduce", "listops", "--recipe", "mine"]).exit_code == 2


def test_energies_end_to_end(tmp_path):
    cases = energy.cases(quick=True)
    assert [case.cfg.model.steps for case in cases] == [30, 100, 30]
    assert [case.cfg.model.rate for case in cases] == ["identity", "free", "gamma_per_step"]
    full = energy.cases("paper")[1].cfg
    assert (full.model.width, full.model.heads, full.iterations) == (64, 1, 100_000)
    cases = [case.changed((*TINY_LISTOPS, "model.steps=6")) for case in cases]
    files = energy.reproduce(cases, tmp_path / "to")
    assert [file.name for file in files] == [
        "ours-30-steps-s0.png", "ours-100-steps-s0.png", "certified-30-steps-s0.png", "energies.md",
    ]  # fmt: skip
    rows = common.read_rows(tmp_path / "to")
    assert rows[0]["watched_tokens"] == 64
    assert 0 <= rows[0]["lower_at_the_end"] <= 1
    assert rows[2]["first_token_rises"] == rows[2]["rising_with_frozen_past"] == 0
    seen = energy.watched(records.read(tmp_path / "to")[rows[0]["case"]])
    assert list(seen.energies) == ["attention", "feedforward", "total"]
    assert seen.energies["total"].shape == (7, 1, 64)
    assert energy.reproduce([], tmp_path / "to", plots_only=True) == files


def test_flops_are_those_of_the_counter(tmp_path, monkeypatch):
    """(Large ones would take seconds; test_flops.py has more kinds of model.)"""
    original = flops.counted_flops_per_token
    monkeypatch.setattr(
        flops,
        "counted_flops_per_token",
        lambda c: original(c) if c.width < 128 else flops.flops_per_token(c),
    )
    results, page = flops.reproduce(tmp_path)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    blocks = [row for row in rows if "block" in row]
    assert len(blocks) == 4 * 6
    assert [row["counter"] for row in blocks] == pytest.approx([1] * 24)
    untied = {row["preset"]: round(row["untied"] / 1e6, 1) for row in rows if "preset" in row}
    assert untied["owt_nrgpt_ff2w_paper"] == 90.4
    assert "## What the paper says" in page.read_text()


def test_seconds_of_training_leave_out_compilation_and_disturbance():
    cfg = debug("log_every=10")
    tokens = 10 * cfg.batch * cfg.model.context
    taken = (60.0, 1.0, 1.0, 300.0, 2.0, 1.2, 1.0)
    entries = [{"step": 1, "tokens_per_second": tokens / seconds} for seconds in taken]
    timed = common.with_seconds([*entries, {"step": 2, "val_loss": 1.0}], cfg)
    found = [entry["seconds"] for entry in timed]
    assert found == pytest.approx([1, 2, 3, 4, 5, 6.2, 7.2, 7.2], abs=2e-3)


def test_sensitivity_changes_one_hyperparameter_at_a_time(tmp_path):
    cases = [case for case in shakespeare.cases("paper", 1) if case.labels["part"] == "sensitivity"]
    of_ff2w = [c for c in cases if c.labels["model"] == "nrgpt_ff2w" and c.cfg.model.width == 128]
    usual = of_ff2w[0].cfg
    assert len(of_ff2w) == 1 + 3 + 2 + 2 + 2  # learning rates, heads, steps, hidden sizes
    for case in of_ff2w[1:]:
        assert len(differences(usual, case.cfg)) == 1, case.name
    of_gpt = {c.cfg.model.steps for c in cases if c.labels["model"] == "gpt"}
    assert of_gpt == {8}
    assert {case.cfg.model.width for case in cases} == {64, 128, 256}


def test_the_spread_of_losses_is_over_configurations():
    def row(loss, lr=1e-3, heads=1, seed=0):
        return {
            "case": f"{lr}-{heads}-{seed}", "model": "gpt", "width": 64, "heads": heads, "lr": lr,
            "steps": 8, "hidden_factor": 4, "iterations": 5, "seed": seed,
            "val_loss_full_best": loss,
        }  # fmt: skip

    rows = [
        *(row(loss, seed=seed) for seed, loss in enumerate((1.4, 1.6))),
        *(row(loss, heads=2, seed=seed) for seed, loss in enumerate((1.6, 1.6))),
        *(row(loss, lr=1e-4, seed=seed) for seed, loss in enumerate((2.0, 2.2))),
        {"case": "diverged", "error": "..."},
    ]
    assert sensitivity.of_configurations(rows) == pytest.approx([1.5, 1.6, 2.1])
    *_, line, _, last = sensitivity.spread_table(rows, "paper").splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    expected = ["1.5000", "0.1000", "0.6000", "0.2625", "0.6000", "0.1000", "-", "-"]
    assert cells[4:] == expected
    assert "diverged" in last


def test_variants_end_to_end(tmp_path):
    some = ("ff2w", "no-norm-psd", "shared")
    cases = [c for c in variants.cases(quick=True, seeds=1) if c.labels["variant"] in some]
    assert {case.labels["task"] for case in cases} == {"listops", "shakespeare"}
    cases = tiny([c for c in cases if c.labels["task"] == "listops"], TINY_LISTOPS)
    (file,) = variants.reproduce(cases, tmp_path / "to")
    rows = {row["variant"]: row for row in common.read_rows(tmp_path / "to")}
    assert rows["shared"]["certificate"]
    assert rows["shared"]["rises_within"] == 0
    assert not rows["ff2w"]["certificate"]
    assert 0 <= rows["ff2w"]["rises"] <= 1
    for variant in some:
        assert variants.VARIANTS[variant][0] in file.read_text()
    with pytest.raises(ValueError, match="the paper trains none of these"):
        variants.cases("paper")


def test_all_of_it_from_records(tmp_path, monkeypatch):
    """Without training: the records that are there, and FLOPs."""
    cases = tiny([c for c in listops.cases(quick=True, seeds=1) if "steps-ff2w" in c.name][:1])
    monkeypatch.chdir(tmp_path)
    listops.reproduce(tiny(cases, TINY_LISTOPS), tmp_path / "experiments" / "listops")
    table = tmp_path / "experiments" / "listops" / "transitions.md"
    table.unlink()
    result = CliRunner().invoke(app, ["reproduce", "paper"])
    assert result.exit_code == 0, result.output
    assert "too few sizes" in table.read_text()
    assert (tmp_path / "experiments" / "flops" / "flops.md").exists()
