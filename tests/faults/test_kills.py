"""Killed, or with a full disk, at the n-th time that it touches the disk: the run goes on and ends
as if nothing had happened."""

import json
import subprocess
import sys

import pytest

from tests.processes import ROOT, environment, output_of, started

NAMES = {"kill": "killed at the n-th write", "full": "disk full at the n-th write"}
SHARDED = ("parallel=fsdp", "sharded=true")


@pytest.mark.parametrize("more", [(), SHARDED], ids=["whole", "sharded"])
@pytest.mark.parametrize("kind", NAMES)
def test_at_every_write_of_a_training(tmp_path, faults, many, kind, more):
    step = many(23, 1)
    arguments = [kind, str(tmp_path), str(step), *more]
    command = [sys.executable, "-m", "tests.faults.dying", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(command, cwd=ROOT, env=environment(), **pipes) as process:
        out, err = output_of(process)
    assert process.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    codes = {line["code"] for line in lines}
    assert codes - {7} == {0, 99 if kind == "kill" else 4}
    with faults(NAMES[kind] + (", sharded" if more else "")) as tried:
        for line in lines[:-1]:
            with tried.fault(f"touch {line['touch']}"):
                assert line["held"], line
