"""Training many runs: those of one shape together, several such packs at a time if asked for."""

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
from ..train.runs import check_config, config_of, differences
from ..train.updates import shape_of
from .records import Record

screen = Console()
SHOWN = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

PACK_BUDGET = 2**28
"""Most of (runs x tokens of a batch x width x steps) in one pack: what its activations grow with.
Large models fill a GPU one by one; small ones, together."""

FAILED = "failed.json"
"""In the folder of a run that diverged for good: why. It is a result, and not tried again."""

Pack = list[tuple[TrainConfig, Path]]


def is_over(cfg: TrainConfig, run: Path) -> bool:
    """Whether a run has its result, or none to come."""
    path = run / "result.json"
    finished = path.exists() and json.loads(path.read_text())["step"] == cfg.iterations
    return finished or (run / FAILED).exists()


def refuse_other_configuration(cfg: TrainConfig, record: Record, where: str) -> None:
    """What is there must be the very run that is asked for. Unlike a run that a user goes on with,
    it may not have another number of iterations: its schedule would be a mixture."""
    if "config.json" not in record:
        return
    passed_over, changed = BOOKKEEPING - {"iterations"}, []
    # The fingerprint of what a finished run was trained on, if it was noted.
    trained_on = record.read("result.json").get("dataset") if "result.json" in record else None
    if cfg.data.folder is not None and trained_on is not None:  # wherever it lies now
        passed_over = passed_over | {"data.folder"}
        if Dataset.open(Path(cfg.data.folder), verify=False).fingerprint != trained_on:
            changed = [f"{cfg.data.folder} is another dataset than it was trained on"]
    stored = config_of(record.read("config.json"), where)
    found = differences(stored, cfg).items()
    differ = changed + [said for name, said in found if name not in passed_over]
    if differ:
        raise ValueError(
            f"{where} is of another configuration ({'; '.join(differ)}); choose a folder of "
            "another name with --to, or remove it (a record: python -m nrgpt.reproduce.records)"
        )


def packs_of(runs: Pack) -> list[Pack]:
    """Runs by shape, no more in one pack than its budget allows."""
    groups: dict[str, Pack] = {}
    for cfg, run in runs:
        groups.setdefault(repr(shape_of(cfg)), []).append((cfg, run))
    packs = []
    for group in groups.values():
        cfg = group[0][0]
        weight = cfg.batch * cfg.model.context * cfg.model.width * cfg.model.steps
        most = max(1, PACK_BUDGET // weight)
        packs += [group[i : i + most] for i in range(0, len(group), most)]
    return packs


def can_be_packed(cfgs: Sequence[TrainConfig], runs: Sequence[Path]) -> bool:
    cfg = cfgs[0]
    if cfg.accumulation > 1 or cfg.checkpoint_steps or cfg.deterministic:
        return False
    saved = [{path.name for path in checkpoint.checkpoints(run / "checkpoints")} for run in runs]
    return not any(saved) or bool(set.intersection(*saved))


def train_pack(cfgs: Sequence[TrainConfig], runs: Sequence[Path]) -> None:
    """Train runs of one shape to their ends, together if possible. One that diverges for good says
    so in its folder, and the others go on."""
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
    """Train what is not over, and hand out each pack as it ends (first, what was over before)."""
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
    """A process for each pack, so many at a time. What it says is in RUN/output.txt of its first
    run. A signal to us is passed on, and we wait until all have saved."""
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
                        log = pack[0][1] / "output.txt"
                        said = f"{pack[0][1].name} ended with {process.returncode}, see {log}"
                        faults.append(said)
        finally:  # whatever ends us, nobody goes on unwatched
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
    interrupt.heed()
    if faults:
        raise TrainingError("; ".join(faults), code=1)


def start(pack: Pack) -> subprocess.Popen[bytes]:
    for cfg, run in pack:
        run.mkdir(parents=True, exist_ok=True)
        check_config(cfg, run)  # writes it, for the process to read
    runs = [str(run) for _, run in pack]
    with (pack[0][1] / "output.txt").open("ab") as log:
        command = [sys.executable, "-m", "nrgpt", "reproduce", "runs", *runs]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
