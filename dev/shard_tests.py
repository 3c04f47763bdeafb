"""Run tests in several processes at once, on a machine without pytest-xdist.

python dev/shard_tests.py --processes 12 --out LOG --seconds 300 tests/kernels tests/model
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "-rfE"]
PYTEST += ["--tb=short", "--show-capture=no"]


def main(
    tests: list[str],
    processes: Annotated[int, typer.Option()] = 12,
    out: Annotated[Path, typer.Option()] = Path("tests.txt"),
    seconds: Annotated[float, typer.Option(help="Then whatever still runs is ended.")] = 300,
) -> None:
    listed = subprocess.run([*PYTEST, "--collect-only", *tests], capture_output=True, text=True)
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    running = []
    for i in range(processes):
        log = out.with_name(f".{out.stem}-{i}.txt").open("w+")
        # Neighbours take alike long: deal them out.
        shard = names[i::processes]
        command = [*PYTEST, *shard]
        running.append((subprocess.Popen(command, stdout=log, stderr=log), log, len(shard)))
    deadline = time.monotonic() + seconds
    failed = False
    with out.open("w") as whole:
        for process, log, count in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.seek(0)
            text = log.read()
            failed |= process.returncode != 0
            whole.write(f"{count} tests, exit code {process.returncode}\n{text[-6000:]}\n")
            print(f"{count} tests, exit code {process.returncode}: {text.strip()[-120:]}")
            Path(log.name).unlink()
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
