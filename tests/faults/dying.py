"""Processes that die, or whose disk is full, at the n-th time that they touch the disk.

    python -m tests.faults.dying kill|full WORK STEP [FIELD=VALUE ...]

One process forks all others, so that the package is loaded once. It prints a line of JSON for each.
Python's audit events tell of every file that is opened for writing, and of every folder, renaming
and removal; what is written in between has not reached the disk when the process ends.
"""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import torch

from nrgpt.train import loop
from nrgpt.train.checkpoint import CheckpointError, newest_valid
from nrgpt.train.sharded import weights_of
from tests.runs import debug, losses, same

TOUCHES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link")
ITERATIONS = 6
WENT_ON = 7
"""The error was no reason to stop. (0: it never came to the n-th time.)"""
state = {"left": -1, "kind": "", "under": ""}


def watch(event, arguments):
    if state["left"] < 0 or not (event in TOUCHES or is_writing(event, arguments)):
        return
    if not str(arguments[0]).startswith(state["under"]):
        return
    state["left"] -= 1
    if state["left"] == 0:
        if state["kind"] == "kill":
            os._exit(99)
        state["left"] = -1
        raise OSError(errno.ENOSPC, "No space left on device", str(arguments[0]))


def is_writing(event, arguments):
    if event != "open" or not isinstance(arguments[0], str | os.PathLike):
        return False
    mode, flags = arguments[1], arguments[2]
    return bool(flags & (os.O_WRONLY | os.O_RDWR)) if mode is None else mode[0] in "wax+"


def configuration(more):
    return debug(
        f"iterations={ITERATIONS}", "save_every=2", "eval_every=3", "log_every=1", "keep=1",
        "optimiser.warmup=1", "data.listops.test=4", *more,
    )  # fmt: skip


def in_child(kind, touch, work, more):
    """Train in a process of its own; returns its exit code: 0, 99 (killed), 4 (a full disk)
    or WENT_ON."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    state.update(left=touch, kind=kind, under=str(work))
    try:
        loop.train(configuration(more), work / "run")
    except (OSError, CheckpointError):
        os._exit(4)
    except BaseException:
        os._exit(1)
    os._exit(WENT_ON if kind == "full" and state["left"] < 0 else 0)


def weights(run):
    newest, _ = newest_valid(run / "checkpoints")
    return weights_of(newest)


def main(kind, work, step, *more):
    torch.set_num_threads(1)
    os.environ["NRGPT_DATA"] = str(work / "data")
    sys.addaudithook(watch)
    assert in_child("none", -1, work / "whole", more) == 0
    expected = work / "whole" / "run"
    touch = 1
    while True:
        folder = work / f"touch-{touch}"
        folder.mkdir()
        code = in_child(kind, touch, folder, more)
        said = {"touch": touch, "code": code, "held": code in (0, 4, 99, WENT_ON)}
        if code:
            newest, faults = newest_valid(folder / "run" / "checkpoints")
            said["held"] &= not faults
            said["step"] = newest.name if newest else None
            said["again"] = in_child("none", -1, folder, more)
            said["held"] &= said["again"] == 0
        if said["held"]:
            run = folder / "run"
            said["held"] = same(weights(run), weights(expected))
            said["held"] &= losses(run) == losses(expected)
            litter = [path.name for path in run.rglob(".*")]
            said["held"] &= not litter
            said["litter"] = litter
        print(json.dumps(said), flush=True)
        shutil.rmtree(folder)
        if code == 0:  # it never came to the n-th time
            return
        touch += step


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute(), int(sys.argv[3]), *sys.argv[4:])
