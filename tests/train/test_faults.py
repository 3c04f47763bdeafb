"""Faults as a user meets them: real processes, real signals, real damage. What comes before and
after is trained in this process, which has loaded the package already."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch

from nrgpt.files import fingerprint
from nrgpt.train import loop
from nrgpt.train.checkpoint import checkpoints, newest_valid
from nrgpt.train.faults import TrainingError
from nrgpt.train.updates import Plain
from tests.processes import finished, output_of, started, wait_for
from tests.runs import command, debug, final_weights, losses, run_cli, same, wait_for_step

FEW = "data.listops.test=4"
"""Expressions that are solved at the end."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path, capfd, number):
    fields = ("optimiser.decay=constant", "save_every=1000000", "eval_every=1000000", FEW)
    arguments = ("train", "debug", *fields, "iterations=1000000", "--to", "run")
    pipes = {"stderr": subprocess.PIPE, "text": True}
    with started(command(*arguments), **pipes) as process:
        wait_for_step(tmp_path / "run", 40, process)
        process.send_signal(number)
        _, said = output_of(process)
    assert process.returncode == 75
    assert f"{number.name}: saved at iteration" in said
    steps = int(checkpoints(tmp_path / "run" / "checkpoints")[0].name[5:]) + 5
    cfg = debug(*fields, f"iterations={steps}")
    loop.train(cfg, tmp_path / "run")
    assert "resuming from" in capfd.readouterr().out
    loop.train(cfg, tmp_path / "other")
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "other"))


def test_a_second_sigint_stops_at_once(tmp_path):
    """The first one is handled while an iteration that never ends is under way."""
    code = (
        "import time, sys; from nrgpt.train import faults, loop; from nrgpt.cli import main\n"
        "handle = faults.Interrupt.handle\n"
        "def noted(*arguments): handle(*arguments); print('noted', flush=True)\n"
        "faults.Interrupt.handle = noted\n"
        "loop.Trainer.advance = lambda self: print('slow', flush=True) or time.sleep(1e6)\n"
        "sys.argv = ['nrgpt', 'train', 'debug', '--to', 'run']; main()"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started([sys.executable, "-c", code], **pipes) as process:
        for word in ("slow", "noted"):
            while word not in process.stdout.readline():
                assert process.poll() is None
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
        output_of(process)
    assert process.returncode == 130


def test_kill_9_costs_no_more_than_the_work_since_the_last_checkpoint(tmp_path):
    """Killed again and again, it still ends where it should."""
    fields = ("iterations=40", "save_every=1", "keep=3", "eval_every=20", "log_every=1", FEW)
    loop.train(debug(*fields), tmp_path / "whole")
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for step in (3, 25):
        with started(command("train", "debug", *fields, "--to", "run"), **nowhere) as process:
            wait_for_step(tmp_path / "run", step, process)
        assert process.returncode == -signal.SIGKILL
    assert newest_valid(tmp_path / "run" / "checkpoints")[0] is not None
    loop.train(debug(*fields), tmp_path / "run")
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "run"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").glob(".unfinished*"))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, capfd):
    run = tmp_path / "run"
    loop.train(debug(FEW), run)
    expected = final_weights(run)
    newest = checkpoints(run / "checkpoints")[0] / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    loop.train(debug(FEW), run)
    said = capfd.readouterr().out
    assert "damaged checkpoint set aside" in said
    assert "step-00000060/model.safetensors" in said.replace("\n", "")
    assert "(iteration 40)" in said
    assert same(final_weights(run), expected)


def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path):
    """Under a limit on file sizes that the second checkpoint does not fit into."""
    run = tmp_path / "run"
    loop.train(debug("iterations=20", FEW), run)
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash"]
    done = finished([*limited, *command("train", "debug", "iterations=60", FEW, "--to", "run")])
    assert done.returncode == 4, done.stderr
    assert "could not write" in done.stderr
    newest, faults = newest_valid(run / "checkpoints")
    assert newest is not None
    assert newest.name == "step-00000020"
    assert not faults
    assert loop.train(debug("iterations=60", FEW), run)["step"] == 60


def test_two_processes_in_one_folder(tmp_path):
    arguments = ("train", "debug", "iterations=100000", "--to", "run")
    with started(command(*arguments), stderr=subprocess.DEVNULL) as process:
        wait_for_step(tmp_path / "run", 20, process)
        done = run_cli(*arguments, code=5)
    assert f"in use by process {process.pid}" in done.stderr


def poison(monkeypatch, spoil):
    """``spoil(trainer, loss, norm)`` changes what a plain update finds."""
    advance, gradients, driving = loop.Trainer.advance, Plain.gradients, []

    def noted(self):
        driving[:] = [self]
        return advance(self)

    monkeypatch.setattr(loop.Trainer, "advance", noted)
    monkeypatch.setattr(Plain, "gradients", lambda *args: spoil(driving[0], *gradients(*args)))


def test_not_finite_goes_back_with_a_smaller_rate(tmp_path, monkeypatch):
    cfg = debug("save_every=10")
    calls = []

    def spoil(trainer, loss, norm):
        step, factor = trainer.step - 1, trainer.members[0].state["rate_factor"]
        calls.append((step, factor))
        return (loss * float("nan") if step == 25 and factor > 0.3 else loss), norm

    poison(monkeypatch, spoil)
    result = loop.train(cfg, tmp_path / "run")
    assert result["rollbacks"] == 2
    assert result["step"] == 60
    assert calls.count((25, 1.0)) == calls.count((25, 0.5)) == calls.count((25, 0.25)) == 1
    assert (20, 0.5) in calls
    assert (20, 0.25) in calls
    steps = [entry["step"] for entry in losses(tmp_path / "run")]
    assert steps == sorted(steps)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_forever_stops_with_an_explanation(tmp_path, monkeypatch, bad):
    poison(
        monkeypatch, lambda trainer, loss, norm: (loss, norm * (bad if trainer.step > 25 else 1))
    )
    with pytest.raises(TrainingError, match="not finite, after 3 retries") as stopped:
        loop.train(debug(), tmp_path / "run")
    assert stopped.value.code == 3
    assert all(torch.isfinite(w).all() for w in final_weights(tmp_path / "run").values())


def test_a_checkpoint_of_bad_weights_is_not_gone_back_to(tmp_path, capfd):
    """A huge first update: the weights of step 1 give NaN whatever the learning rate, and only
    those of step 0, with a smaller one, can help."""
    options = ("iterations=8", "save_every=1", "eval_every=8", "optimiser.warmup=0")
    cfg = debug(*options, "optimiser.lr=5e3", "nan_retries=20")
    result = loop.train(cfg, tmp_path / "run")
    assert result["step"] == 8
    assert 2 <= result["rollbacks"] < 20
    said = capfd.readouterr().err
    assert said.count("back to iteration 0") >= 2
    assert "back to iteration 1" not in said
    assert (tmp_path / "run" / "checkpoints" / "not-finite-step-00000001").is_dir()


def test_damaged_checkpoints_do_not_crowd_out_good_ones(tmp_path):
    cfg = debug("iterations=60", "save_every=20", "eval_every=1000", "keep=3")
    loop.train(cfg, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    for path in checkpoints(folder)[:2]:
        (path / "model.safetensors").write_bytes(b"damaged")
    (folder / ".unfinished-00000010-1").mkdir()
    loop.train(
        debug("iterations=60", "save_every=7", "eval_every=1000", "keep=2"), tmp_path / "run"
    )
    assert [path.name for path in checkpoints(folder)] == ["step-00000060", "step-00000056"]
    assert newest_valid(folder)[1] == []
    assert len(list(folder.glob("damaged-*"))) == 2
    assert not list(folder.glob(".unfinished*"))


def test_other_data_than_before_is_refused(tmp_path):
    cfg = debug("iterations=10")
    loop.train(cfg, tmp_path / "run")
    state = checkpoints(tmp_path / "run" / "checkpoints")[0] / "state.json"
    manifest = state.with_name("manifest.json")
    changed = json.loads(state.read_text()) | {"dataset": "another"}
    state.write_text(json.dumps(changed))
    entries = json.loads(manifest.read_text()) | {"state.json": fingerprint(state)}
    manifest.write_text(json.dumps(entries))
    tokenizer = tmp_path / "run" / "tokenizer.json"
    tokenizer.write_text("as it was")
    with pytest.raises(ValueError, match=r"is not the dataset that .*run was trained on"):
        loop.train(cfg, tmp_path / "run")
    assert tokenizer.read_text() == "as it was"


def test_runs_that_start_together_make_their_dataset_once(tmp_path):
    """The second waits for the first, instead of refusing what it finds half made."""
    arguments = ("train", "debug", "iterations=6", "data.listops.seed=77")
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                started(command(*arguments, "--to", name), stderr=subprocess.PIPE, text=True)
            )
            for name in ("a", "b")
        ]
        for process in processes:
            _, said = output_of(process)
            assert process.returncode == 0, said


HOSTILE = """
import sys
sys.modules["fcntl"] = None  # as on Windows
import warnings; warnings.simplefilter("ignore")
from nrgpt.cli import main
sys.argv = ["nrgpt", *sys.argv[1:]]
main()
"""


def test_a_training_without_fcntl(tmp_path):
    """Windows has none; locks still lock."""
    never = ("save_every=1000000", "eval_every=1000000")  # so that there is a checkpoint of step 0
    fields = ("log_every=1", FEW, *never, "--to", "run")
    hostile = [sys.executable, "-c", HOSTILE, "train", "debug", *fields]
    longer = [*hostile, "iterations=100000"]
    with started(longer, stderr=subprocess.DEVNULL) as process:
        wait_for_step(tmp_path / "run", 5, process)
        done = finished(longer)
        assert done.returncode == 5, done.stderr
    # The lock of a process that was killed is no lock.
    done = finished([*hostile, "iterations=6"])
    assert done.returncode == 0, done.stderr
    assert "everything is in run" in done.stdout


def test_a_training_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("NRGPT_COMMIT", "")
    loop.train(debug("iterations=6", FEW), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["commit"] is None


@pytest.mark.parametrize("locale", ["C", "en_US.ISO-8859-1"])
def test_a_training_under_any_locale(tmp_path, locale):
    own = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    own |= {"PYTHONIOENCODING": "ascii"}
    env = {**os.environ, **own}
    run_cli("train", "debug", "iterations=6", FEW, "--to", "run", env=env)
    assert "⟶" in (tmp_path / "run" / "samples.txt").read_text(encoding="utf-8")
    assert (tmp_path / "run" / "result.json").exists()


def test_a_training_outlives_its_terminal(tmp_path):
    """`nrgpt train ... 2>&1 | head`: nobody reads any more."""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    arguments = ("train", "debug", "iterations=80", "log_every=1", FEW, "--to", "run")
    with started(command(*arguments), **pipe) as process:
        process.stdout.readline()
        process.stdout.close()
        wait_for(lambda: process.poll() is not None, what="the end of the training")
    assert process.returncode == 0
    assert (tmp_path / "run" / "result.json").exists()
