"""A server in a process of its own, as users start it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.processes import patience, started


@contextmanager
def serving(*options: str, model: str = "zoo:shakespeare_certified", **environment: str):
    """Start `nrgpt serve`; gives its address and its process."""
    command = [sys.executable, "-m", "nrgpt", "serve", model, "--port", "0", *options]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with started(command, env=environ, **pipes) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("serving at "):
                    yield line.split()[2], process
                    break
            else:
                raise AssertionError("the server did not start")
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):  # it is killed then
                process.wait(patience())


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as (found, _):
        yield found
