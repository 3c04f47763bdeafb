"""Several processes on one machine, as torchrun starts them."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from safetensors.torch import load_file

from nrgpt.train.checkpoint import newest_valid
from nrgpt.train.distributed import seconds_to_wait
from nrgpt.train.runs import load_run
from nrgpt.train.sharded import read_whole
from tests.processes import finished, output_of, started, wait_for
from tests.runs import wait_for_step

SHORT = (
    "debug",
    "iterations=12",
    "eval_every=12",
    "save_every=6",
    "log_every=1",
    "model.dropout=0",
)


def torchrun(processes, *arguments):
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *start, "-m", "nrgpt", "train", *arguments]


def run(*command, code=0):
    done = finished(command)
    assert (done.returncode == 0) == (code == 0), done.stderr[-3000:]
    return done


def weights(folder):
    newest, _ = newest_valid(folder / "checkpoints")
    assert newest is not None
    return load_file(newest / "model.safetensors")


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max((a[key] - b[key]).abs().max().item() for key in a)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "options", [("optimiser.name=adamw",), ("accumulation=2", "model.block=gpt")]
)
def test_any_number_of_processes_learns_the_same(tmp_path, parallel, options):
    """Two processes see the global batch that one sees: equal weights, up to rounding."""
    run(sys.executable, "-m", "nrgpt", "train", *SHORT, *options, "--to", "one")
    run(*torchrun(2, *SHORT, *options, f"parallel={parallel}", "--to", "two"))
    assert largest_difference(weights(tmp_path / "one"), weights(tmp_path / "two")) < 1e-5
    one, two = (json.loads((tmp_path / r / "result.json").read_text()) for r in ("one", "two"))
    assert abs(one["val_loss_full"] - two["val_loss_full"]) < 1e-5


def test_a_run_goes_on_with_other_numbers_of_processes(tmp_path):
    """One, then two, then four: the same batches in the same order, so the same weights."""
    options = ("debug", "eval_every=12", "save_every=4", "log_every=1", "model.dropout=0")
    decay = "optimiser.decay=constant"  # the schedule must not depend on where a part ends
    run(sys.executable, "-m", "nrgpt", "train", *options, decay, "iterations=12", "--to", "one")
    part = [*options, decay, "final_evaluation=false", "--to", "many"]
    run(sys.executable, "-m", "nrgpt", "train", *part, "iterations=6")
    run(*torchrun(2, *part, "iterations=8"))
    done = run(*torchrun(4, *part, "iterations=12"))
    assert "(iteration 8)" in done.stdout
    assert largest_difference(weights(tmp_path / "one"), weights(tmp_path / "many")) < 1e-5
    losses = [
        [
            json.loads(line).get("loss")
            for line in (tmp_path / r / "metrics.jsonl").read_text().splitlines()
        ]
        for r in ("one", "many")
    ]
    for one, many in zip(*([x for x in own if x is not None] for own in losses), strict=True):
        assert abs(one - many) < 1e-5


def test_every_process_writes_its_share(tmp_path):
    """torch.distributed.checkpoint: two processes, stopped and gone on, learn what one would have
    learned. One alone can read it all, and damage is found."""
    options = ("debug", "eval_every=12", "save_every=3", "log_every=1", "model.dropout=0")
    options = (*options, "optimiser.decay=constant", "optimiser.name=adamw")
    run(sys.executable, "-m", "nrgpt", "train", *options, "iterations=12", "--to", "one")
    shares = ("parallel=fsdp", "sharded=true", "--to", "many")
    part = [*options, *shares, "final_evaluation=false"]
    run(*torchrun(2, *part, "iterations=6"))
    newest, _ = newest_valid(tmp_path / "many" / "checkpoints")
    names = sorted(path.name for path in (newest / "shards").iterdir())
    assert [name[:11] for name in names] == ["shard-00001", "shard-00002"]
    assert sum("optimiser/" in name for name in load_file(newest / "shards" / names[1])) > 0
    done = run(*torchrun(2, *options, *shares, "iterations=12"))
    assert "(iteration 6)" in done.stdout
    loaded = load_run(tmp_path / "many").model.state_dict()
    assert largest_difference(weights(tmp_path / "one"), loaded) < 1e-5
    newest, faults = newest_valid(tmp_path / "many" / "checkpoints")
    assert newest.name == "step-00000012"
    assert not faults
    mine, theirs = read_whole(newest), read_whole(newest_valid(tmp_path / "one" / "checkpoints")[0])
    assert largest_difference(mine[1], theirs[1]) < 1e-4
    with (newest / "shards" / names[0]).open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"harm")
    newest, faults = newest_valid(tmp_path / "many" / "checkpoints")
    assert newest.name == "step-00000009"
    assert f"{names[0]}: its contents have changed" in faults[0]


def test_compiled_models_learn_the_same_under_ddp(tmp_path):
    run(sys.executable, "-m", "nrgpt", "train", *SHORT, "model.steps=2", "--to", "one")
    run(*torchrun(2, *SHORT, "model.steps=2", "compile=true", "--to", "two"))
    assert largest_difference(weights(tmp_path / "one"), weights(tmp_path / "two")) < 1e-5


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_signal_to_one_process_stops_all_and_they_go_on(tmp_path, parallel):
    arguments = (
        "debug",
        "iterations=400",
        "model.dropout=0.1",
        f"parallel={parallel}",
        "log_every=5",
    )
    with started(torchrun(2, *arguments, "--to", "run"), stderr=subprocess.PIPE) as agent:
        wait_for_step(tmp_path / "run", 20, agent)
        os.kill(worker_of(agent, rank=1), signal.SIGTERM)
        _, said = output_of(agent)
    assert b"saved at iteration" in said
    newest, faults = newest_valid(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert not faults
    stopped_at = int(newest.name.removeprefix("step-"))
    assert 20 <= stopped_at < 400
    done = run(*torchrun(2, *arguments, "iterations=420", "--to", "run"))
    assert f"(iteration {stopped_at})" in done.stdout


def worker_of(agent, rank):
    """The process that torchrun started with this rank."""

    def found():
        for worker in psutil.Process(agent.pid).children():
            with contextlib.suppress(psutil.Error):
                if worker.environ().get("RANK") == str(rank):
                    return worker.pid
        return None

    return wait_for(found, agent, f"the worker of rank {rank}")


def test_a_rank_that_stands_still_does_not_hold_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("NRGPT_TIMEOUT", "5")
    arguments = ("debug", "iterations=100000", "log_every=5", "--to", "run")
    pipes = {"stderr": subprocess.PIPE, "text": True}
    with started(torchrun(2, *arguments), **pipes) as agent:
        wait_for_step(tmp_path / "run", 20, agent)
        still = worker_of(agent, rank=1)
        os.kill(still, signal.SIGSTOP)
        lines = []
        while not any("had no answer from another one" in line for line in lines[-1:]):
            lines.append(agent.stderr.readline())
            assert lines[-1], "".join(lines)
        os.kill(still, signal.SIGKILL)  # torchrun would wait half a minute for it
        output_of(agent)
    assert "process 0 had no answer" in lines[-1]
    assert "NRGPT_TIMEOUT = 5 seconds" in lines[-1]
    assert newest_valid(tmp_path / "run" / "checkpoints")[0] is not None


def test_a_time_limit_that_is_none(monkeypatch):
    for text in ("soon", "-1", "nan", "1e9"):
        monkeypatch.setenv("NRGPT_TIMEOUT", text)
        with pytest.raises(ValueError, match=r"NRGPT_TIMEOUT = '.*': must be a number of seconds"):
            seconds_to_wait()


NAN_ON_ONE = """
import os, sys
from nrgpt.train.updates import Plain
from nrgpt.cli import main
original = Plain.gradients
def gradients(self, batch):
    loss, norm = original(self, batch)
    bad = self.where.rank == 1 and batch.step == 8 and not os.path.exists("bad")
    if bad:
        open("bad", "w").close()
    return (loss * float("nan") if bad else loss), norm
Plain.gradients = gradients
sys.argv = ["nrgpt", "train", "debug", "iterations=12", "save_every=6", "--to", "run"]
main()
"""


def test_a_nan_in_one_process_sends_all_back(tmp_path):
    script = tmp_path / "nan.py"
    script.write_text(NAN_ON_ONE)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run(*start, str(script))
    assert "back to iteration 6, learning rate x 0.5" in done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rollbacks"] == 1
    assert all(torch.isfinite(w).all() for w in weights(tmp_path / "run").values())


def test_a_batch_that_cannot_be_shared_is_refused():
    done = run(*torchrun(2, "debug", "batch=7", "--to", "run"), code=1)
    assert "batch = 7: must be a multiple of 2 processes x accumulation = 1" in done.stderr


OTHER_FOLDERS = """
import os, sys
from nrgpt.train import checkpoint
from nrgpt.cli import main
found = checkpoint.checkpoints
checkpoint.checkpoints = lambda f: [] if os.environ["RANK"] == "1" else found(f)
sys.argv = ["nrgpt", "train", "debug", "iterations=12", "--to", "run"]
main()
"""


def test_nodes_that_do_not_share_the_folder_say_so(tmp_path):
    run(*torchrun(2, "debug", "iterations=6", "--to", "run"))
    script = tmp_path / "other.py"
    script.write_text(OTHER_FOLDERS)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run(*start, str(script), code=1)
    assert "all nodes must see the same run folder" in done.stderr
