"""Train and measure models side by side on one GPU inside a time budget.

    python -m experiments.settled.run --jobs experiments/settled/jobs_1.jsonl --budget 540 --out OUT

A job is a line of JSON (see one.py), with the "seconds" it is expected to take among others. Jobs
start in their order as slots become free, if they are expected to end in time; what runs at the end
of the budget is stopped, and what it has measured by then is kept. OUT/results.jsonl has a line for
each measurement, OUT/logs.txt the end of each log. With --scratch the same command goes on where it
was stopped: trainings from their last checkpoint, and without the jobs that are done.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

END_OF_LOG = 8_000
GRACE = 30
"""Seconds that a training gets to save itself."""


class Running:
    def __init__(self, job: dict[str, Any], args: argparse.Namespace, scratch: Path):
        self.job, self.began, self.log = job, time.time(), scratch / f"{job['name']}.log"
        command = [sys.executable, "-m", "experiments.settled.one", json.dumps(job)]
        command += ["--data", str(args.data), "--scratch", str(scratch), "--out", str(args.out)]
        cores = str(max(1, (os.cpu_count() or 2) // args.parallel))
        settings = {
            "PYTHONPATH": "src:.",
            "PYTHONUNBUFFERED": "1",
            "NRGPT_DATA": str(scratch / "data"),
            "OMP_NUM_THREADS": cores,
            "TORCHINDUCTOR_COMPILE_THREADS": cores,
        }
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | settings,
                start_new_session=True,
            )

    def end(self, out: Path) -> None:
        """Stop it if it still runs, and keep the end of its log."""
        code = self.process.poll()
        if code is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(timeout=GRACE)
        how = {None: "stopped at the end of the budget", 0: "done"}.get(code, f"failed ({code})")
        seconds = time.time() - self.began
        text = self.log.read_text(errors="replace")[-END_OF_LOG:]
        with open(out / "logs.txt", "a") as file:
            file.write(f"===== {self.job['name']}: {how}, {seconds:.0f} s\n{text}\n")
        print(f"{self.job['name']}: {how}, {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=540)
    parser.add_argument("--parallel", type=int, default=3)
    parser.add_argument("--data", type=Path, default=Path("gpu_data"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    parser.add_argument("--scratch", type=Path, help="where runs are; default a new folder")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = args.jobs.read_text().splitlines()
    scratch, began = args.scratch or Path(tempfile.mkdtemp(prefix="settled-")), time.time()
    scratch.mkdir(parents=True, exist_ok=True)
    jobs = [json.loads(line) for line in lines if line.strip()]
    left = [job for job in jobs if not (scratch / f"{job['name']}.done").exists()]
    running: list[Running] = []
    try:
        while left or running:
            for ended in [r for r in running if r.process.poll() is not None]:
                running.remove(ended)
                ended.end(args.out)
            remaining = args.budget - (time.time() - began)
            if remaining <= 0:
                break
            fitting = [job for job in left if job.get("seconds", 0) <= remaining]
            if len(running) < args.parallel and fitting:
                left.remove(fitting[0])
                running.append(Running(fitting[0], args, scratch))
                if len(running) == 1:
                    time.sleep(5)  # the first prepares the data
            elif not running:
                break
            time.sleep(0.2)
    finally:
        for still in running:
            still.end(args.out)
    if left:
        print("never started:", ", ".join(job["name"] for job in left), flush=True)


if __name__ == "__main__":
    main()
