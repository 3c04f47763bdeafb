"""Processes that tests start: always ended, and waited for as long as this machine needs.

How long that is, is measured: a process that loads the package takes two seconds on an idle machine
and twenty on a busy one. A wait that has come to its end measures again before it gives up.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
SHARE = 60
"""A wait ends after this many times what a process takes to start."""
measured: list[float] = []


def patience(again: bool = False) -> float:
    """Seconds after which a wait is hopeless."""
    if again or not measured:
        began = time.monotonic()
        code = "import nrgpt.cli.commands"
        # The one wait that cannot be measured: nothing takes ten minutes to be imported.
        subprocess.run([sys.executable, "-c", code], check=True, timeout=600, env=environment())
        measured.append(time.monotonic() - began)
    return SHARE * max(1.0, *measured)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def wait_for(condition, process=None, what="what was waited for"):
    """Return when the condition holds; its value is returned."""
    began, limit = time.monotonic(), patience()
    while not (found := condition()):
        if process is not None and process.poll() is not None and not condition():
            raise AssertionError(
                f"{what} did not come: the process ended with {process.returncode}"
            )
        if time.monotonic() - began > limit:
            if (longer := patience(again=True)) <= limit:
                raise AssertionError(f"{what} did not come within {limit:.0f} s")
            limit = longer
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def started(command, **options):
    """A process that is ended, with all that it started, when the block is left."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        end(process)


def end(process):
    """Kill a process and its descendants, and close its pipes."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(patience())
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def output_of(process):
    """Wait for the end of a process; what it wrote to its pipes."""
    limit = patience()
    while True:
        try:
            return process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            if (longer := patience(again=True)) <= limit:
                raise
            limit = longer


def finished(command, **options):
    """Run a command to its end; like subprocess.run, but its descendants end with it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with started(command, **pipes) as process:
        out, err = output_of(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)
