"""Sweeps: grids and searches, resumable, with a table and a plot."""

import json
import os
import signal

import pytest

from nrgpt.train import sweep
from nrgpt.train.faults import DIVERGED, Interrupt, TrainingError
from nrgpt.train.overrides import known_names, override
from nrgpt.train.presets import GRIDS, PRESETS

QUICK = ("iterations=6", "eval_every=6", "eval_batches=1", "data.listops.test=5")


def run(*assignments, **options):
    cfg = override(PRESETS["debug"](), QUICK)
    return sweep.run_sweep("debug", cfg, assignments, **options)


def test_a_grid_runs_every_combination_once(tmp_path, monkeypatch, capsys):
    rows = run("model.width=8,16", "seed=0,1", folder=tmp_path / "s")
    assert len(rows) == 4
    assert [r["val_loss_full"] for r in rows] == sorted(r["val_loss_full"] for r in rows)
    assert {(r["model.width"], r["seed"]) for r in rows} == {
        (w, s) for w in ("8", "16") for s in ("0", "1")
    }
    assert (tmp_path / "s" / "sweep.png").stat().st_size > 1000
    assert len((tmp_path / "s" / "results.jsonl").read_text().splitlines()) == 4
    assert "model.width" in capsys.readouterr().out
    monkeypatch.setattr(sweep, "train", lambda *_: pytest.fail("a finished run was run again"))
    assert run("model.width=8,16", "seed=0,1", folder=tmp_path / "s") == rows


def test_a_grid_goes_on_where_it_stopped(tmp_path, monkeypatch):
    original, calls = sweep.train, []

    def stops(cfg, folder):
        calls.append(folder.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(cfg, folder)

    monkeypatch.setattr(sweep, "train", stops)
    with pytest.raises(KeyboardInterrupt):
        run("seed=0,1,2", folder=tmp_path / "s")
    assert len(run("seed=0,1,2", folder=tmp_path / "s")) == 3
    assert calls == ["seed=0", "seed=1", "seed=1", "seed=2"]


@pytest.mark.parametrize("trials", [None, 3])
def test_a_signal_at_the_end_of_a_run_ends_the_sweep(tmp_path, monkeypatch, trials):
    original, calls = sweep.train, []

    def ends(cfg, run):
        calls.append(cfg.seed)
        with Interrupt().watching():
            result = original(cfg, run)
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(sweep, "train", ends)
    with pytest.raises(TrainingError, match="SIGTERM: all is saved"):
        run("seed=0,1,2", folder=tmp_path / "s", trials=trials)
    assert len(calls) == 1


def test_results_of_another_configuration_are_not_taken_for_ours(tmp_path):
    run("seed=0", folder=tmp_path / "s")
    other = override(PRESETS["debug"](), (*QUICK, "batch=4"))
    with pytest.raises(ValueError, match=r"another configuration \(batch: 8 -> 4"):
        sweep.run_sweep("debug", other, ("seed=0",), folder=tmp_path / "s")


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path, monkeypatch):
    original = sweep.train

    def diverges(cfg, folder):
        if cfg.seed == 0:
            raise TrainingError("iteration 3: loss nan", DIVERGED)
        return original(cfg, folder)

    monkeypatch.setattr(sweep, "train", diverges)
    rows = run("seed=0,1", folder=tmp_path / "s")
    assert [row["seed"] for row in rows] == ["1", "0"]
    assert rows[1]["error"] == "iteration 3: loss nan"


def test_a_search_remembers_its_trials(tmp_path):
    options = {"folder": tmp_path / "s", "trials": 2}
    first = run("optimiser.lr=log(1e-4,1e-2)", "model.heads=1,2", **options)
    assert len(first) == 2
    assert all(1e-4 <= row["optimiser.lr"] <= 1e-2 for row in first)
    more = run("optimiser.lr=log(1e-4,1e-2)", "model.heads=1,2", folder=tmp_path / "s", trials=3)
    assert len(more) == 3
    assert {json.dumps(r) for r in first} <= {json.dumps(r) for r in more}
    assert (tmp_path / "s" / "sweep.db").exists()


def test_wrong_sweeps_are_refused_before_the_first_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "train", lambda *_: pytest.fail("should not start"))
    with pytest.raises(ValueError, match=r"no field 'model\.widht'; did you mean 'model\.width'"):
        run("model.widht=8,16", folder=tmp_path / "s")
    with pytest.raises(ValueError, match="heads = 3"):
        run("model.heads=2,3", folder=tmp_path / "s")
    with pytest.raises(ValueError, match="--trials"):
        run("optimiser.lr=log(1e-4,1e-2)", folder=tmp_path / "s")
    with pytest.raises(ValueError, match="grid = 'nope'"):
        run(folder=tmp_path / "s", grid="nope")


def test_values_may_be_tuples():
    assert sweep.split_values("1,2") == ["1", "2"]
    assert sweep.split_values("('max','min'),('sum',)") == ["('max','min')", "('sum',)"]


def test_impossible_combinations_of_a_named_grid_are_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(GRIDS, "odd", {"model.width": (8, 9), "seed": (0,)})
    rows = run(folder=tmp_path / "s", grid="odd")
    assert [row["model.width"] for row in rows] == ["8"]
    said = capsys.readouterr().out.replace("\n", " ")
    assert "1 of 2 combinations are left out, the first because of heads = 2" in said
    monkeypatch.setitem(GRIDS, "odd", {"model.width": (9,), "seed": (0,)})
    with pytest.raises(ValueError, match="heads = 2"):
        run(folder=tmp_path / "s", grid="odd")


@pytest.mark.parametrize("name", ["shakespeare_gpt_paper", "shakespeare_nrgpt_ff2w"])
def test_the_papers_grids_can_run(name, tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(sweep, "run_one", lambda cfg, chosen, folder: sizes.append(chosen) or {})
    monkeypatch.setattr(sweep, "show", lambda *_: None)
    sweep.run_sweep(name, PRESETS[name](), (), tmp_path, grid="shakespeare")
    assert len(sizes) == 1512 - 72


def test_runs_that_are_not_evaluated_are_compared_by_estimates(tmp_path, capsys):
    rows = run("seed=0,1", "final_evaluation=false", folder=tmp_path / "s")
    found = [row["best_val_loss_estimate"] for row in rows]
    assert found == sorted(found)
    assert "estimated" in capsys.readouterr().out
    (row,) = run("optimiser.lr=log(1e-4,1e-3)", "final_evaluation=false", trials=1,
                 folder=tmp_path / "t")  # fmt: skip
    assert row["best_val_loss_estimate"] > 0


def test_the_papers_grids_name_real_fields():
    known = known_names(PRESETS["debug"]())
    assert all(key in known for grid in GRIDS.values() for key in grid)


def proposed(rows):
    return [{key: row[key] for key in row if "." in key} for row in rows]


RANGES = ("optimiser.lr=log(1e-4,1e-2)", "model.steps=int(1,3)")


def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    """Stopped between two trials, and within one. More than ten: then Optuna learns from them."""
    monkeypatch.setattr(sweep, "train", lambda cfg, run: {sweep.OBJECTIVE: cfg.optimiser.lr})
    monkeypatch.setattr(sweep, "show", lambda *_: None)
    monkeypatch.setattr(sweep, "plot", lambda *_: None)
    asked = []
    carry_out = sweep.run_one
    monkeypatch.setattr(sweep, "run_one", lambda *a: asked.append(a[1]) or carry_out(*a))
    run(*RANGES, folder=tmp_path / "whole", trials=13)
    whole = list(asked)
    assert len({json.dumps(values) for values in whole}) == 13
    asked.clear()
    run(*RANGES, folder=tmp_path / "split", trials=4)
    dies = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
    for trials in (5, 9, 12):
        with monkeypatch.context() as patch:
            patch.setattr(sweep, "train", dies)
            with pytest.raises(KeyboardInterrupt):
                run(*RANGES, folder=tmp_path / "split", trials=trials)
        asked.pop()
        run(*RANGES, folder=tmp_path / "split", trials=trials)
    run(*RANGES, folder=tmp_path / "split", trials=13)
    assert asked == whole


def test_impossible_proposals_are_passed_over_and_counted(tmp_path, capsys):
    rows = run("model.heads=int(1,5)", folder=tmp_path / "s", trials=8)
    assert len(rows) == 8
    impossible = [row for row in rows if row.get("impossible")]
    assert {row["model.heads"] for row in impossible} <= {3, 5}
    assert {row["model.heads"] for row in rows if row not in impossible} <= {1, 2, 4}
    assert impossible
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"{len(impossible)} of 8 trials were impossible: heads = " in said
    assert "not possible" in said
    with pytest.raises(ValueError, match="heads = 3: must be a divisor"):
        run("model.heads=int(3,3)", folder=tmp_path / "t", trials=2)
    # What was wrong was something else, and the corrected command begins anew.
    with pytest.raises(ValueError, match=r"no trial was possible: .*warmup = 50: must be less"):
        run("model.heads=int(1,5)", "optimiser.warmup=50", folder=tmp_path / "t", trials=8)
    assert not (tmp_path / "t").exists()
    assert len(run("model.heads=int(1,2)", folder=tmp_path / "t", trials=1)) == 1


@pytest.mark.parametrize(
    "given",
    ["optimiser.lr=log(a,b)", "optimiser.lr=log(0,1)", "optimiser.lr=uniform(2,1)",
     "model.heads=int(1.5,2)", "optimiser.lr=log(1,inf)", "optimiser.lr=log(1,1e999)"],
)  # fmt: skip
def test_ranges_that_are_none(tmp_path, given):
    with pytest.raises(ValueError, match=r"must be \w+\(low,high\) with two"):
        run(given, folder=tmp_path / "s", trials=1)
    assert not (tmp_path / "s").exists()


def test_a_file_that_is_no_record_of_trials(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.db").write_bytes(b"garbage" * 1000)
    with pytest.raises(ValueError, match=r"sweep\.db cannot be used .* move it away"):
        run(*RANGES, folder=tmp_path / "s", trials=1)


def test_two_searches_in_one_folder(tmp_path, monkeypatch):
    from nrgpt.files import locked

    (tmp_path / "s").mkdir()
    with locked(tmp_path / "s" / "lock"), pytest.raises(TrainingError, match="is in use") as said:
        run(*RANGES, folder=tmp_path / "s", trials=1)
    assert said.value.code == 5


@pytest.mark.parametrize(
    "value", ["../../x", "/etc/passwd", "..", "a/b", "c" * 300, "ö" * 200, "\n", "..\\x"]
)
def test_no_value_leads_out_of_the_folder(value):
    name = sweep.folder_name({"data.folder": value})
    assert "/" not in name
    assert "\\" not in name
    assert len(name.encode()) <= 200
    assert name != sweep.folder_name({"data.folder": value + "x"})
    assert sweep.folder_name({"seed": 0, "model.width": 8}) == "model.width=8,seed=0"


def test_a_folder_that_is_no_sweep_keeps_its_files(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "results.jsonl").write_text("mine")
    with pytest.raises(ValueError, match=r"holds results\.jsonl but no runs"):
        run("seed=0", folder=tmp_path / "s")
    assert (tmp_path / "s" / "results.jsonl").read_text() == "mine"
