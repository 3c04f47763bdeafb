"""Several processes on one machine. Most are forked (ranks.py); some are started by torchrun."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from safetensors.torch import load_file

from nrgpt.train import loop
from nrgpt.train.checkpoint import CheckpointError, newest_valid
from nrgpt.train.distributed import seconds_to_wait
from nrgpt.train.metrics import read_metrics
from nrgpt.train.runs import load_run
from nrgpt.train.sharded import read_whole, weights_of
from tests.processes import ROOT, environment, finished, output_of, patience, started, wait_for
from tests.runs import debug, wait_for_step

SHORT = (
    "iterations=12", "eval_every=12", "save_every=6", "log_every=1", "model.dropout=0",
    "data.listops.test=5",
)  # fmt: skip
CONSTANT = (
    "eval_every=12", "log_every=1", "model.dropout=0", "optimiser.decay=constant",
    "data.listops.test=5",
)  # fmt: skip
"""For runs of several parts: the schedule does not depend on where a part ends."""


@pytest.fixture(scope="module")
def forks():
    """A process that has loaded the package, and forks others for each job."""
    command = [sys.executable, "-m", "tests.train.ranks"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with started(command, cwd=ROOT, env=environment(), **pipes) as process:
        yield process


@pytest.fixture
def run(forks, tmp_path):
    """Run `nrgpt train debug ...` in several processes; returns what they have said."""

    def run(processes, *arguments, code=0, before="", **variables):
        job = {
            "processes": processes, "arguments": ["train", "debug", *arguments], "before": before,
            "folder": str(tmp_path), "environment": dict(os.environ) | variables,
            "seconds": patience(),
        }  # fmt: skip
        forks.stdin.write(json.dumps(job) + "\n")
        forks.stdin.flush()
        answer = forks.stdout.readline()  # it ends its processes, when their time is over
        said = "".join((tmp_path / f"rank{i}.txt").read_text() for i in range(processes))
        assert code in json.loads(answer), (answer, said[-3000:])
        assert (set(json.loads(answer)) == {0}) == (code == 0), (answer, said[-3000:])
        return said

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of what one process learns; each is trained once."""
    folder, done = tmp_path_factory.mktemp("alone"), {}

    def alone(*options):
        if options not in done:
            done[options] = folder / str(len(done))
            loop.train(debug(*options), done[options])
        return done[options]

    return alone


def torchrun(processes, *arguments):
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *start, "-m", "nrgpt", "train", "debug", *arguments]


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
def test_any_number_of_processes_learns_the_same(run, alone, parallel, options, tmp_path):
    """Two processes see the global batch that one sees: equal weights, up to rounding."""
    run(2, *SHORT, *options, f"parallel={parallel}", "--to", "two")
    one, two = alone(*SHORT, *options), tmp_path / "two"
    assert largest_difference(weights(one), weights(two)) < 1e-5
    loss = [json.loads((r / "result.json").read_text())["val_loss_full"] for r in (one, two)]
    assert abs(loss[0] - loss[1]) < 1e-5


def test_a_run_goes_on_with_other_numbers_of_processes(run, alone, tmp_path):
    """One, then two, then four: the same batches in the same order, so the same weights."""
    options = (*CONSTANT, "save_every=4")
    loop.train(debug(*options, "final_evaluation=false", "iterations=6"), tmp_path / "many")
    part = (*options, "final_evaluation=false", "--to", "many")
    done = finished(torchrun(2, *part, "iterations=8"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(iteration 8)" in run(4, *part, "iterations=12")
    one, many = alone(*options, "iterations=12"), tmp_path / "many"
    assert largest_difference(weights(one), weights(many)) < 1e-5
    losses = [[x["loss"] for x in read_metrics(r) if "loss" in x] for r in (one, many)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert len(losses[0]) == 12


def test_every_process_writes_its_share(run, alone, tmp_path):
    """torch.distributed.checkpoint: two processes, stopped and gone on, learn what one would have
    learned. One alone can read it all, and damage is found."""
    options = (*CONSTANT, "save_every=3", "optimiser.name=adamw")
    shares = ("parallel=fsdp", "sharded=true", "--to", "many")
    run(2, *options, *shares, "final_evaluation=false", "iterations=6")
    newest, _ = newest_valid(tmp_path / "many" / "checkpoints")
    names = sorted(path.name for path in (newest / "shards").iterdir())
    assert [name[:11] for name in names] == ["shard-00001", "shard-00002"]
    assert sum("optimiser/" in name for name in load_file(newest / "shards" / names[1])) > 0
    assert "(iteration 6)" in run(2, *options, *shares, "iterations=12")
    one = alone(*options, "iterations=12")
    loaded = load_run(tmp_path / "many").model.state_dict()
    assert largest_difference(weights(one), loaded) < 1e-5
    newest, faults = newest_valid(tmp_path / "many" / "checkpoints")
    assert newest.name == "step-00000012"
    assert not faults
    mine, theirs = read_whole(newest), read_whole(newest_valid(one / "checkpoints")[0])
    assert largest_difference(mine[1], theirs[1]) < 1e-4
    with (newest / "shards" / names[0]).open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"harm")
    newest, faults = newest_valid(tmp_path / "many" / "checkpoints")
    assert newest.name == "step-00000009"
    assert f"{names[0]}: its contents have changed" in faults[0]


def test_shares_go_on_with_other_numbers_of_processes(run, alone, tmp_path):
    """One, then four, then two: each writes and reads its share."""
    options = (*CONSTANT, "save_every=2", "optimiser.name=adamw", "final_evaluation=false")
    shares = ("parallel=fsdp", "sharded=true")
    loop.train(debug(*options, *shares, "iterations=6"), tmp_path / "many")
    for processes, iterations in ((4, 8), (2, 10)):
        words = (*options, *shares, f"iterations={iterations}", "--to", "many")
        assert f"(iteration {iterations - 2})" in run(processes, *words)
        newest, faults = newest_valid(tmp_path / "many" / "checkpoints")
        assert len(list((newest / "shards").iterdir())) == processes
        assert not faults
    loop.train(debug(*options, "iterations=12"), tmp_path / "many")
    one = alone(*options, "iterations=12")
    assert largest_difference(weights(one), weights(tmp_path / "many")) < 1e-5


def test_half_of_the_shares_is_no_checkpoint(run, tmp_path):
    """A training removes one after the other: a reader must not take zeros for weights."""
    words = ("parallel=fsdp", "sharded=true", "final_evaluation=false", "--to", "run")
    run(2, *CONSTANT, "save_every=3", "iterations=6", *words)
    newest, _ = newest_valid(tmp_path / "run" / "checkpoints")
    (newest / "shards" / sorted(os.listdir(newest / "shards"))[0]).unlink()
    with pytest.raises(CheckpointError, match=r"shard-00001.*: missing"):
        weights_of(newest)
    assert load_run(tmp_path / "run").step < 6


KILLED = """
import os, signal
from nrgpt.train import sharded
write = sharded.dcp.HuggingFaceStorageWriter.write_data
def killed(self, plan, planner):
    if os.environ["RANK"] == "1" and "00000006" in str(self.path):
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, plan, planner)
sharded.dcp.HuggingFaceStorageWriter.write_data = killed
"""


def test_a_process_killed_while_it_writes_its_share(run, alone, tmp_path):
    """The others end too, what is half written is cleared, and the run goes on as if nothing had
    happened."""
    options = (*CONSTANT, "save_every=3", "iterations=9", "optimiser.name=adamw")
    words = (*options, "parallel=fsdp", "sharded=true", "--to", "run")
    run(2, *words, before=KILLED, code=6, NRGPT_TIMEOUT="100")
    assert newest_valid(tmp_path / "run" / "checkpoints")[0].name == "step-00000003"
    assert list((tmp_path / "run" / "checkpoints").glob(".unfinished-*"))
    assert "(iteration 3)" in run(2, *words)
    assert not list((tmp_path / "run" / "checkpoints").glob(".unfinished-*"))
    loaded = load_run(tmp_path / "run").model.state_dict()
    assert largest_difference(weights(alone(*options)), loaded) < 1e-5


NO_FOLDER = """
import os, pathlib
mkdir = pathlib.Path.mkdir
def fails(self, *arguments, **options):
    if os.environ["RANK"] == "0" and self.name == ".unfinished-00000003-shards":
        raise OSError(28, "No space left on device", str(self))
    return mkdir(self, *arguments, **options)
pathlib.Path.mkdir = fails
"""


def test_a_share_that_cannot_be_written_ends_all_at_once(run, tmp_path):
    """None waits for the process that has failed."""
    options = (*CONSTANT, "save_every=3", "parallel=fsdp", "sharded=true", "--to", "run")
    said = run(2, *options, "iterations=6", before=NO_FOLDER, code=4, NRGPT_TIMEOUT="100000")
    assert "could not write checkpoint" in said
    assert "No space left on device" in said
    assert newest_valid(tmp_path / "run" / "checkpoints")[0].name == "step-00000000"


def test_compiled_models_learn_the_same_under_ddp(run, alone, tmp_path):
    """What DDP changes is how the graph is cut, which needs no C++ compiler."""
    options = (*SHORT, "model.steps=2")
    quick = "import functools, torch\n"
    quick += "torch.compile = functools.partial(torch.compile, backend='aot_eager')"
    run(2, *options, "compile=true", "--to", "two", before=quick)
    assert largest_difference(weights(alone(*options)), weights(tmp_path / "two")) < 1e-5


AT_20 = """
import os, signal
from nrgpt.train import loop
advance = loop.Trainer.advance
def stopped(self):
    found = advance(self)
    if self.step == 20 and self.where.rank == 1:
        os.kill(os.getpid(), signal.{})
    return found
loop.Trainer.advance = stopped
"""


def test_a_signal_to_one_process_stops_all_and_they_go_on(run, tmp_path):
    options = (*SHORT[1:], "parallel=fsdp", "model.dropout=0.1", "--to", "run")
    said = run(2, *options, "iterations=100", before=AT_20.format("SIGTERM"), code=75)
    assert "saved at iteration 20" in said
    newest, faults = newest_valid(tmp_path / "run" / "checkpoints")
    assert newest.name == "step-00000020"
    assert not faults
    assert "(iteration 20)" in run(2, *options, "iterations=22")


def test_a_signal_to_one_process_of_torchrun(run, tmp_path):
    arguments = ("parallel=ddp", "log_every=5", "data.listops.test=5", "--to", "run")
    with started(torchrun(2, *arguments, "iterations=100000"), stderr=subprocess.PIPE) as agent:
        wait_for_step(tmp_path / "run", 20, agent)
        os.kill(worker_of(agent, rank=1), signal.SIGTERM)
        _, said = output_of(agent)
    (stopped_at,) = set(re.findall(r"saved at iteration (\d+)", said.decode()))
    newest, faults = newest_valid(tmp_path / "run" / "checkpoints")
    assert newest.name == f"step-{int(stopped_at):08d}"
    assert not faults
    said = run(2, *arguments, f"iterations={int(stopped_at) + 2}")
    assert f"(iteration {stopped_at})" in said


def worker_of(agent, rank):
    """The process that torchrun started with this rank."""

    def found():
        for worker in psutil.Process(agent.pid).children():
            with contextlib.suppress(psutil.Error):
                if worker.environ().get("RANK") == str(rank):
                    return worker.pid
        return None

    return wait_for(found, agent, f"the worker of rank {rank}")


def test_a_rank_that_stands_still_does_not_hold_the_others(run, tmp_path):
    seconds = f"{patience() / 20:g}"
    arguments = ("iterations=100000", "log_every=5", "--to", "run")
    said = run(2, *arguments, before=AT_20.format("SIGSTOP"), code=6, NRGPT_TIMEOUT=seconds)
    assert "process 0 had no answer" in said
    assert f"NRGPT_TIMEOUT = {seconds} seconds" in said
    assert newest_valid(tmp_path / "run" / "checkpoints")[0] is not None


def test_a_time_limit_that_is_none(monkeypatch):
    for text in ("soon", "-1", "nan", "1e9"):
        monkeypatch.setenv("NRGPT_TIMEOUT", text)
        with pytest.raises(ValueError, match=r"NRGPT_TIMEOUT = '.*': must be a number of seconds"):
            seconds_to_wait()


NAN_ON_ONE = """
import os
from nrgpt.train.updates import Plain
original = Plain.gradients
def gradients(self, batch):
    loss, norm = original(self, batch)
    bad = self.where.rank == 1 and batch.step == 8 and not os.path.exists("bad")
    if bad:
        open("bad", "w").close()
    return (loss * float("nan") if bad else loss), norm
Plain.gradients = gradients
"""


def test_a_nan_in_one_process_sends_all_back(run, tmp_path):
    said = run(2, *SHORT, "--to", "run", before=NAN_ON_ONE)
    assert "back to iteration 6, learning rate x 0.5" in said
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rollbacks"] == 1
    assert all(torch.isfinite(w).all() for w in weights(tmp_path / "run").values())


def test_a_batch_that_cannot_be_shared_is_refused(run):
    said = run(2, "batch=7", "--to", "run", code=2)
    assert "batch = 7: must be a multiple of 2 processes x accumulation = 1" in said


OTHER_FOLDERS = """
import os
from nrgpt.train import checkpoint
found = checkpoint.checkpoints
checkpoint.checkpoints = lambda f: [] if os.environ["RANK"] == "1" else found(f)
"""


def test_nodes_that_do_not_share_the_folder_say_so(run, tmp_path):
    loop.train(debug(*SHORT[1:], "iterations=6"), tmp_path / "run")
    said = run(2, *SHORT, "--to", "run", before=OTHER_FOLDERS, code=2)
    assert "all nodes must see the same run folder" in said


ENDS = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel
from nrgpt.train.distributed import world

def end_with_an_error():
    with world("cpu") as where:
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        where.agree(where.rank)
        raise ValueError("as a refused start")

for number in range(30):
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    try:
        end_with_an_error()
    except ValueError:
        pass
"""


def test_an_error_does_not_stop_at_the_end_of_its_model(run):
    """DDP's model goes with the error, right after a collective: that has waited without end for a
    thread which waited for Python's lock, within sixty such ends."""
    run(2, "iterations=6", "data.listops.test=5", "--to", "run", before=ENDS)
