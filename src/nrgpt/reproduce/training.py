"""Train many runs: those of one shape together, as a pack, and several packs at a time if asked."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..data.shards import Dataset
from ..files import write_atomically
from ..train import checkpoint
from ..train.config import BOOKKEEPING, TrainConfig
from ..train.faults import DIVERGED, INTERRUPTED, Interrupt, TrainingError
from ..train.loop import train, train_packed
from ..train.runs import check_config, config_of, differences, is_finished, write_config
from ..train.updates import by_shape
from .records import Record

screen = Console(markup=False, emoji=False)
SHOWN = (
    TextColumn("{task.description}", markup=False),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)

PACK_BUDGET = 2**28
"""The most that (runs x tokens of a batch x width x steps) may be in one pack: the memory for its
activations grows with that product."""

FAILED = "failed.json"
"""In the folder of a run that diverged for good: the reason. Such a run is not tried again."""

Pack = list[tuple[TrainConfig, Path]]


def is_over(cfg: TrainConfig, run: Path) -> bool:
    """Whether a run has finished, or diverged for good."""
    return is_finished(cfg, run) or (run / FAILED).exists()


def refuse_other_configuration(cfg: TrainConfig, record: Record, where: str) -> None:
    """Raise an error unless a run on record is the one asked for. Its number of iterations counts,
    too: with another one it would have had another learning-rate schedule."""
    if "config.json" not in record:
        return
    may_differ, differ = BOOKKEEPING - {"iterations"}, []
    # The fingerprint of the dataset that a finished run was trained on, if it was noted.
    trained_on = record.read("result.json").get("dataset") if "result.json" in record else None
    if cfg.data.folder is not None and trained_on is not None:  # its folder may have moved
        may_differ = may_differ | {"data.folder"}
        if Dataset.open(Path(cfg.data.folder), verify=False).fingerprint != trained_on:
            differ = [f"{cfg.data.folder} is another dataset than it was trained on"]
    found = differences(config_of(record.read("config.json"), where), cfg)
    differ += [said for name, said in found.items() if name not in may_differ]
    if differ:
        raise ValueError(
            f"{where} is of another configuration ({'; '.join(differ)}); choose a folder of "
            "another name with --to, or remove it (a record: python -m nrgpt.reproduce.records)"
        )


def packs_of(runs: Pack) -> list[Pack]:
    """Runs by shape, in packs that stay within the budget."""

    def most(cfg: TrainConfig) -> int:
        weight = cfg.batch * cfg.model.context * cfg.model.width * cfg.model.steps
        return max(1, PACK_BUDGET // weight)

    return by_shape(runs, most)


def can_be_packed(cfgs: Sequence[TrainConfig], runs: Sequence[Path]) -> bool:
    cfg = cfgs[0]
    if cfg.accumulation > 1 or cfg.checkpoint_steps or cfg.deterministic:
        return False
    saved = [{path.name for path in checkpoint.checkpoints(run / "checkpoints")} for run in runs]
    return not any(saved) or bool(set.intersection(*saved))


def train_pack(cfgs: Sequence[TrainConfig], runs: Sequence[Path]) -> None:
    """Train runs of one shape to the end, together if possible. If one diverges for good, this is
    noted in its folder, and the others go on."""
    with Interrupt().watching() as interrupt:
        if len(cfgs) > 1 and can_be_packed(cfgs, runs):
            try:
                train_packed(cfgs, runs)
            except TrainingError as error:
                if error.code != DIVERGED:
                    raise
        for cfg, run in zip(cfgs, runs, strict=True):
            if is_over(cfg, run):
                continue
            interrupt.heed()
            try:
                train(cfg, run)
            except TrainingError as error:
                if error.code != DIVERGED:
                    raise
                write_atomically(run / FAILED, json.dumps({"error": str(error)}) + "\n")


def train_all(runs: Pack, processes: int) -> Iterator[Pack]:
    """Train all runs that are not over. Yields those that are, then each pack when it is done."""
    over = [(cfg, run) for cfg, run in runs if is_over(cfg, run)]
    if over:
        yield over
    packs = packs_of([(cfg, run) for cfg, run in runs if not is_over(cfg, run)])
    if processes > 1:
        yield from in_processes(packs, processes)
        return
    for number, pack in enumerate(packs, 1):
        first, others = pack[0][1].name, len(pack) - 1
        said = f"{first} and {others} more" if others else first
        screen.print(f"pack {number} of {len(packs)}: {said}", highlight=False, soft_wrap=True)
        with Interrupt().watching() as interrupt:
            train_pack([cfg for cfg, _ in pack], [run for _, run in pack])
        yield pack
        if number < len(packs):
            interrupt.heed()


def in_processes(packs: list[Pack], processes: int) -> Iterator[Pack]:
    """Train each pack in a process of its own, ``processes`` at a time. Its output goes to
    RUN/output.txt of its first run. If this process is told to stop, so are the others, and it
    waits until they have saved."""
    waiting = list(reversed(packs))
    running: dict[subprocess.Popen[bytes], Pack] = {}
    faults = []
    with Interrupt().watching() as interrupt, Progress(*SHOWN, console=screen) as bar:
        task = bar.add_task("runs", total=sum(map(len, packs)))
        try:
            while (waiting or running) and not interrupt.received:
                while waiting and len(running) < processes:
                    pack = waiting.pop()
                    running[start(pack)] = pack
                time.sleep(0.1)
                for process in [p for p in running if p.poll() is not None]:
                    pack = running.pop(process)
                    bar.update(task, advance=len(pack))
                    if process.returncode == 0:
                        yield pack
                    elif process.returncode != INTERRUPTED:
                        run = pack[0][1]
                        said = f"{run.name} ended with {process.returncode}"
                        faults.append(f"{said}, see {run / 'output.txt'}")
        finally:  # no process is left behind, whatever happens here
            for process in running:
                process.terminate()
            for process in running:
                end(process)
    interrupt.heed()
    if faults:
        raise TrainingError("; ".join(faults), code=1)


PATIENCE = 600
"""Seconds for a process to finish its update and save, once it was told to."""


def end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(PATIENCE)


def start(pack: Pack) -> subprocess.Popen[bytes]:
    for cfg, run in pack:
        run.mkdir(parents=True, exist_ok=True)
        check_config(cfg, run)
        write_config(cfg, run)  # for the process to read
    runs = [str(run) for _, run in pack]
    with (pack[0][1] / "output.txt").open("ab") as log:
        command = [sys.executable, "-m", "nrgpt", "reproduce", "runs", *runs]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
