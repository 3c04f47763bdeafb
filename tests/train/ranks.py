"""Trainings by several processes without torchrun: all are forked from one that has loaded the
package, which takes a second instead of ten.

    python -m tests.train.ranks

reads a job from each line of its input, and answers with the exit codes of its processes.
"""

import json
import os
import signal
import socket
import sys
import time
import traceback

import torch

from nrgpt.cli import main
from nrgpt.cli.commands import app


def be_rank(job, number, port):
    """Run `nrgpt ...` as one of several processes; it writes to rankN.txt."""
    os.chdir(job["folder"])
    ranks = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": job["processes"]}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({k: str(v) for k, v in (job["environment"] | ranks | place).items()})
    said = os.open(f"rank{number}.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = ["nrgpt", *job["arguments"]]
    code = 1
    try:
        exec(job["before"], {})
        main()
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(job):
    """The exit codes of all processes. When one has failed, the others have a while to notice."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = {}
    for number in range(job["processes"]):
        child = os.fork()
        if not child:
            be_rank(job, number, port)
        running[child] = number
    codes, end = {}, time.monotonic() + job["seconds"]
    while running:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                number = running.pop(child)
                codes[number] = os.waitstatus_to_exitcode(status)
                if codes[number]:
                    end = min(end, time.monotonic() + job["seconds"] / 20)
        if time.monotonic() > end:
            for child in running:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[number] for number in sorted(codes)]


if __name__ == "__main__":
    assert app  # all that a training needs is loaded before the first fork
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
