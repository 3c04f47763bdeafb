"""Faults while a run is trained: split, stopped and not finite at any step."""

import signal

import pytest
import torch

from nrgpt.train import loop
from nrgpt.train.faults import SIGNALS, TrainingError
from nrgpt.train.updates import Plain
from tests.runs import debug, final_weights, losses, same, stop_at

KINDS = [
    ("optimiser.name=adamw", "model.dropout=0.1"),
    ("optimiser.name=muon", "model.rate=free_per_step"),
    ("model.block=gpt", "accumulation=2"),
]


def short(steps, *fields):
    every = ("save_every=1000", "eval_every=5", "log_every=1", "optimiser.warmup=2")
    return debug(f"iterations={steps}", *every, "eval_batches=1", "data.listops.test=4", *fields)


def test_split_at_every_step(tmp_path, faults, many, monkeypatch):
    steps = many(5, 60)
    with faults("split at every step") as tried:
        for kind in KINDS[: many(1, 3)]:
            cfg = short(steps, *kind)
            whole = tmp_path / f"whole{KINDS.index(kind)}"
            loop.train(cfg, whole)
            for step in range(1, steps):
                with tried.fault(f"{kind} at {step}"):
                    run = tmp_path / f"{whole.name}-{step}"
                    with monkeypatch.context() as patch:
                        stop_at(patch, step)
                        with pytest.raises(TrainingError, match=f"saved at iteration {step}"):
                            loop.train(cfg, run)
                    loop.train(cfg, run)
                    assert same(final_weights(run), final_weights(whole))
                    assert losses(run) == losses(whole)


def test_every_signal_at_any_step(tmp_path, faults, many, monkeypatch):
    cfg = short(12)
    with faults("signals") as tried:
        for number in SIGNALS:
            for step in range(1, many(2, 12)):
                with tried.fault(f"{number.name} at {step}"), monkeypatch.context() as patch:
                    stop_at(patch, step, number)
                    with pytest.raises(TrainingError, match=signal.Signals(number).name) as stopped:
                        loop.train(cfg, tmp_path / f"{number.name}-{step}")
                    assert stopped.value.code == 75


def test_not_finite_at_any_step(tmp_path, faults, many, monkeypatch):
    steps, original = many(4, 16), Plain.gradients
    with faults("not finite at any step") as tried:
        for bad in (float("nan"), float("inf"))[: many(1, 2)]:
            for where in range(steps):
                seen = []

                def spoiled(self, batch, where=where, bad=bad, seen=seen):
                    loss, norm = original(self, batch)
                    if batch.step == where and not seen:
                        seen.append(where)
                        return loss * bad, norm
                    return loss, norm

                with tried.fault(f"{bad} at {where}"), monkeypatch.context() as patch:
                    patch.setattr(Plain, "gradients", spoiled)
                    run = tmp_path / f"{bad}-{where}"
                    assert loop.train(short(steps, "save_every=3"), run)["rollbacks"] == 1
                    assert all(torch.isfinite(w).all() for w in final_weights(run).values())
                    logged = [entry["step"] for entry in losses(run)]
                    assert logged == sorted(logged)
                    assert set(logged) == set(range(1, steps + 1))


def test_a_second_writer(tmp_path, faults, many):
    from nrgpt.files import locked

    cfg = short(6)
    with faults("a second writer") as tried:
        for number in range(many(2, 50)):
            run = tmp_path / str(number)
            run.mkdir()
            with tried.fault(number):
                with locked(run / "lock"), pytest.raises(TrainingError, match="in use") as refused:
                    loop.train(cfg, run)
                assert refused.value.code == 5
                assert not (run / "config.json").exists()
