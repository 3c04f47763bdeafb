"""Run probes side by side on one GPU inside a time budget.

    python experiments/descent/run_jobs.py --jobs experiments/descent/jobs_1.jsonl \\
        --budget 560 --parallel 3 --out $OUT

A job is a line of JSON: overrides of probe.Config, with a name. All write to OUT/results.jsonl as
they go; the log of a job that has ended (or was killed at the budget's end) is added to
OUT/logs.txt. A freed slot takes the first job that is expected to end within the budget: seconds
by multiply-adds as in the jobs that have ended, or --rate before any has. What a job measures is
written as it goes, loss first, so a job killed at the end has lost the rest only.
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

import numpy as np
import torch
from prepare import unpack
from probe import Config, Model

HERE = Path(__file__).resolve().parent


FIXED = 8e10
"""Compiling and measuring take about as long as so many multiply-adds a token, times updates."""


def cost(job: dict) -> float:
    c = Config(**job)
    with torch.device("meta"):
        macs = Model(c).macs()
    if c.depth:
        macs *= (0.5 * sum(c.depth) + c.prelude * c.loops) / (c.steps + c.prelude * c.loops)
    fixed = FIXED if c.steps else FIXED / 4
    return fixed + macs * c.updates * c.batch * c.context / 16_384


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=560)
    parser.add_argument("--parallel", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.75, help="seconds for 1e9 of cost")
    parser.add_argument("--data", type=Path, default=Path("gpu_data"))
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT", "."))
    parser.add_argument("--set", default="{}", help="overrides for all jobs, as JSON")
    args = parser.parse_args()
    begun = time.time()
    args.out = Path(args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [line for line in args.jobs.read_text().splitlines() if line.strip() and line[0] != "#"]
    jobs = [{**json.loads(line), **json.loads(args.set)} for line in lines]
    work = Path(tempfile.mkdtemp(prefix="probe"))
    for name in ("train", "val"):
        np.save(work / f"{name}.npy", unpack((args.data / f"{name}.xz").read_bytes()))
    environment = {
        **os.environ,
        "PROBE_LOCK": str(work / "turn"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 2) // args.parallel)),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // args.parallel)),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTHONUNBUFFERED": "1",
    }
    running: dict[subprocess.Popen, tuple[dict, Path, float]] = {}
    left = list(jobs)
    rates: list[float] = []
    costs = {id(job): cost(job) for job in jobs}

    def choose(seconds: float) -> dict | None:
        rate = float(np.median(rates)) if rates else args.rate / 1e9
        # 0.9: the last ones have fewer beside them.
        return next((job for job in left if 0.9 * rate * costs[id(job)] < seconds), None)

    def end(process: subprocess.Popen, how: str) -> None:
        job, log, start = running.pop(process)
        name = job.get("name", "job")
        if how == "done":
            rates.append((time.time() - start) / costs[id(job)])
        text = log.read_text(errors="replace")
        if len(text) > 20_000:
            text = text[:6_000] + "\n...\n" + text[-14_000:]
        with open(args.out / "logs.txt", "a") as file:
            file.write(f"===== {name}: {how}, {time.time() - start:.0f} s\n{text}\n")
        print(
            f"{time.time() - begun:6.0f} s  {name}: {how}, {time.time() - start:.0f} s", flush=True
        )

    try:
        while left or running:
            now = time.time() - begun
            while len(running) < args.parallel and (job := choose(args.budget - now)):
                left.remove(job)
                log = work / f"{len(jobs) - len(left)}.log"
                command = [sys.executable, str(HERE / "probe.py"), "--data", str(work)]
                command += ["--out", str(args.out / "results.jsonl"), "--json", json.dumps(job)]
                with open(log, "w") as file:
                    process = subprocess.Popen(
                        command,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
                running[process] = (job, log, time.time())
                print(f"{now:6.0f} s  {job.get('name', 'job')}: started", flush=True)
            for process in list(running):
                if process.poll() is not None:
                    end(
                        process,
                        "done" if process.returncode == 0 else f"failed ({process.returncode})",
                    )
            if now > args.budget or not (running or choose(args.budget - now)):
                break
            time.sleep(0.2)
    finally:
        for process in list(running):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end(process, "killed at the end of the budget")
        if left:
            print("never started:", ", ".join(j.get("name", "job") for j in left), flush=True)


if __name__ == "__main__":
    main()
