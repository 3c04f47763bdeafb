"""The training loop, for one run or several that are trained together.

Everything random in iteration t, the batch and the dropout, is a function of (seed, t, rank). So a
run that is resumed from a checkpoint needs only weights, optimiser state and the number of the
iteration, and equals the uninterrupted run bit for bit.

Each run has a folder of its own, with the same files whether it is trained alone or with others,
and can be resumed either way. updates.py computes the updates.
"""

import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.shards import Dataset
from ..model.flops import flops_per_token
from . import checkpoint, sharded
from .config import TrainConfig
from .data import Streams, check_vocabulary, keep_tokenizer, open_dataset, prepare_dataset
from .distributed import World, world
from .faults import DIVERGED, INTERRUPTED, Interrupt, TrainingError, only_process
from .history import WAY_OUT, refuse_to_start_over, what_happened
from .memory import check_memory
from .optim import rate_at
from .report import Report
from .result import write_result
from .runs import check_config, read_result, write_config
from .sources import weights_from
from .speed import rate_of_this_machine
from .updates import Batch, Failure, Plain, choose_update


def train(cfg: TrainConfig, run: Path) -> dict[str, Any]:
    """Train in the folder ``run``, or resume what is there; returns the final results."""
    return train_packed([cfg], [run])[0]


def train_packed(cfgs: Sequence[TrainConfig], runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Train all configurations together, each in its folder; returns their results. A run that
    cannot stay with the others goes on alone when they are done."""
    if not cfgs or len(cfgs) != len(runs) or len(set(runs)) != len(runs):
        raise ValueError("training needs a folder of its own for each of one or more runs")
    with ExitStack() as stack:
        where = stack.enter_context(world(cfgs[0].device))
        interrupt = stack.enter_context(Interrupt().watching())
        choose_update(cfgs, where)  # these raise errors before anything is written
        check_memory(cfgs, where)
        if where.is_first:
            for run in runs:
                stack.enter_context(only_process(run))
            for cfg, run in zip(cfgs, runs, strict=True):
                check_config(cfg, run)
            for data in dict.fromkeys(cfg.data for cfg in cfgs):
                size, more = cfgs[0].model.vocab_size, cfgs[0].more_tokens
                check_vocabulary(data, size, more=more)
                prepare_dataset(data)
                open_dataset(data, size, more=more)  # reads and checks every byte
        where.barrier()
        if cfgs[0].deterministic:
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        left = Trainer(cfgs, runs, where, interrupt).fit()
        if where.device.type == "cuda":
            gc.collect()  # frees memory of recorded updates before the next runs
    for member in left:
        interrupt.heed()
        train(member.cfg, member.run)
    return [read_result(run) for run in runs]


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """The seed of the random generator in one iteration."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])


def steps_of_update(cfg: TrainConfig, step: int) -> int | None:
    """The number of inference steps in one update, the same in all processes."""
    if cfg.random_steps is None:
        return None
    least, most = cfg.random_steps
    return int(np.random.default_rng([cfg.seed, step, 1]).integers(least, most + 1))


@dataclass(eq=False)
class Member:
    """One of the runs that a trainer drives."""

    number: int
    cfg: TrainConfig
    run: Path
    dataset: Dataset
    report: Report = field(init=False)
    state: dict[str, Any] = field(
        default_factory=lambda: {"rate_factor": 1.0, "rollbacks": 0, "best": {}}
    )
    """What a checkpoint holds besides tensors, iteration, dataset and the next."""
    kept_metrics: dict[str, Any] | None = None
    """How much of metrics.jsonl was on the disk when the checkpoint was written."""

    @property
    def folder(self) -> Path:
        return self.run / "checkpoints"

    def rate(self, step: int) -> float:
        """The learning rate as a share of its largest."""
        rate = rate_at(step, self.cfg.iterations, self.cfg.optimiser)
        return float(self.state["rate_factor"] * rate)


class Trainer:
    """Trains runs together that differ only in seed, data and the optimiser's numbers."""

    def __init__(
        self, cfgs: Sequence[TrainConfig], runs: Sequence[Path], where: World, interrupt: Interrupt
    ):
        self.cfg, self.where, self.interrupt = cfgs[0], where, interrupt
        vocabulary = self.cfg.model.vocab_size
        # The first process has verified the data, and the others waited for it.
        opened = {cfg.data: open_dataset(cfg.data, vocabulary, verify=False) for cfg in cfgs}
        self.members = [
            Member(number, cfg, run, opened[cfg.data])
            for number, (cfg, run) in enumerate(zip(cfgs, runs, strict=True))
        ]
        self.running = list(self.members)
        """Those that are still trained together."""
        self.streams = {}
        for split in ("train", "val"):
            tokens = {
                data: dataset.tokens(split, data.order if split == "train" else "random")
                for data, dataset in opened.items()
            }
            of_runs = [tokens[cfg.data] for cfg in cfgs]
            self.streams[split] = Streams(of_runs, where.device, self.cfg.masking)
        self.update = choose_update(cfgs, where)(cfgs, where)
        self.step = 0
        if not self.resume():  # raises an error if the dataset has changed
            self.begin_from_others()
        missing = {opened[cfg.data].tokenizer.missing() for cfg in cfgs if cfg.final_evaluation}
        for why in missing - {None}:
            if where.is_first:
                print(f"samples.txt will hold numbers instead of text: {why}")
        # From here on this is a run, and nothing has been written before.
        for member in self.members:
            options = {"quiet": not where.is_first, "show": member.number == 0}
            member.report = Report(member.run, member.cfg, self.step, **options)
        for member in self.members if where.is_first else ():
            write_config(member.cfg, member.run)
            keep_tokenizer(member.run, member.dataset)

    def fit(self) -> list[Member]:
        """Train to the end; returns the runs that had to leave the others."""
        cfg = self.cfg
        together = cfg.batch // (cfg.accumulation * self.where.size)
        self.flops = flops_per_token(cfg.model, batch=together)
        self.peak = rate_of_this_machine(self.where.device, cfg.precision)
        try:
            if self.step == 0:
                self.save(self.running)
            since, began = time.perf_counter(), self.step
            while self.step < cfg.iterations and self.running:
                losses = self.advance()
                self.members[0].report.advance(self.step)
                stop = self.where.any(self.interrupt.received is not None)
                last = self.step == cfg.iterations
                logs, evaluates, saves = (
                    self.step % every == 0
                    for every in (cfg.log_every, cfg.eval_every, cfg.save_every)
                )
                writes = stop or last or logs or evaluates or saves
                if (writes or not self.update.is_deferred) and self.has_gone_back():
                    since, began = time.perf_counter(), self.step
                    continue
                if logs:
                    values = self.where.mean(losses).tolist()  # waits for the device
                    self.log(values, (self.step - began) / (time.perf_counter() - since))
                improved = self.evaluate() if evaluates or last else []
                if logs or evaluates or last:
                    since, began = time.perf_counter(), self.step
                if to_save := self.running if stop or last or saves else improved:
                    self.save(to_save)
                if stop and not last:
                    name = self.interrupt.received or "a signal to another process"
                    raise TrainingError(
                        f"{name}: saved at iteration {self.step}; run the same command to resume",
                        code=INTERRUPTED,
                    )
            self.finish()
        finally:
            for member in self.members:
                member.report.close()
        return [member for member in self.members if member not in self.running]

    def advance(self) -> Tensor:
        """One update of all runs; returns their losses."""
        cfg, where, step = self.cfg, self.where, self.step
        seeds = [member.cfg.seed for member in self.members]
        sizes = {"size": cfg.batch, "context": cfg.model.context}
        drawn = self.streams["train"].batch(
            seeds, step=step, rank=where.rank, world=where.size, **sizes
        )
        own = [seed_of_step(seed, step, where.rank) for seed in seeds]
        rates = [member.rate(step) for member in self.members]
        self.step += 1
        return self.update(Batch(step, *drawn, steps_of_update(cfg, step), own, rates))

    def finish(self) -> None:
        """Evaluate the finished runs, and write RUN/result.json."""
        self.interrupt.all_is_saved = True
        self.members[0].report.progress.stop()
        for member in self.running:
            if self.cfg.final_evaluation:
                self.say(f"evaluating {member.run.name} on the whole validation split")
            run = member.run if self.where.is_first else None
            state = {"step": self.step, **member.state}
            model = self.update.model(member.number)
            progress = member.report.show and member.report.is_watched
            write_result(run, model, member.dataset, member.cfg, state, progress=progress)
        self.where.barrier()

    # Reports -----------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self.members[0].report.say(text)

    def log(self, losses: list[float], updates_per_second: float) -> None:
        """Tokens per second are those of a single run."""
        speed = updates_per_second * self.cfg.batch * self.cfg.model.context
        for member in self.running:
            member.report.log(
                self.step,
                loss=losses[member.number],
                lr=member.rate(self.step - 1) * member.cfg.optimiser.lr,
                tokens_per_second=speed,
                mfu=len(self.running) * speed / self.where.size * self.flops / self.peak,
            )

    def evaluate(self) -> list[Member]:
        """Estimate losses on fixed random batches; returns the runs that have improved."""
        seeds = [member.cfg.seed + 1 for member in self.members]
        train, val = (self.update.estimates(self.streams[s], seeds) for s in ("train", "val"))
        improved = []
        for member in self.running:
            found = val[member.number]
            member.report.log(self.step, train_loss=train[member.number], val_loss=found)
            if found < member.state["best"].get("val_loss", float("inf")):
                member.state["best"] = {"step": self.step, "val_loss": found}
                improved.append(member)
        return improved

    # Checkpoints -------------------------------------------------------------------------------

    def save(self, members: Sequence[Member]) -> None:
        for member in members:
            state = dict(member.state, dataset=member.dataset.fingerprint)
            if self.where.is_first:
                state["metrics"] = member.report.metrics.keep()
            if self.cfg.sharded and isinstance(self.update, Plain):
                self.update.save_share(member.folder, self.step, state)
                continue
            weights, optimiser = self.update.tensors(member.number)  # takes all processes
            if self.where.is_first:
                checkpoint.save_checkpoint(member.folder, self.step, weights, optimiser, state)
        if self.where.is_first:
            # Only now: killed between two members' saves, all must still share a checkpoint.
            common = self.common_step(self.running)
            for member in members:
                needed = (common, member.state["best"].get("step"))
                checkpoint.prune(member.folder, self.cfg.keep, needed)
        self.where.barrier()

    def begin_from_others(self) -> None:
        """Weights of the models that init_from names."""
        for member in self.members:
            if member.cfg.init_from is not None:
                like = self.update.model(member.number)
                source, tokenizer = member.cfg.init_from, member.dataset.tokenizer
                self.update.load(member.number, weights_from(source, like, tokenizer), {})

    def common_step(self, members: Sequence[Member]) -> int | None:
        """The newest iteration of which all these runs have a checkpoint."""
        saved = [set(map(checkpoint.number_of, checkpoint.checkpoints(m.folder))) for m in members]
        common = set.intersection(*saved) if saved else set()
        return max(common, default=None)

    def resume(self) -> bool:
        """Go on from the newest iteration of which all runs have a valid checkpoint, if any."""
        if self.where.is_first:
            for member in self.members:
                for fault in checkpoint.tidy(member.folder):
                    print(f"damaged checkpoint set aside: {fault}")
        self.where.barrier()
        with_any = [m for m in self.members if checkpoint.checkpoints(m.folder)]
        for member in self.members:
            if member not in with_any and self.where.is_first:
                refuse_to_start_over(member.run)
        step = self.common_step(self.members)
        if with_any and step is None:
            # One that had left the others was stopped before it could go on alone.
            step = max(m for m in map(self.newest, with_any))
            self.running = [m for m in self.members if self.newest(m) == step]
            left = ", ".join(m.run.name for m in self.members if m not in self.running)
            print(f"{left}: at another iteration than the others, and trained after them")
        for member in self.running if step is not None else ():
            path = member.folder / f"step-{step:08d}"
            self.load(member, path)
            if self.where.is_first:
                print(f"resuming from {path} (iteration {self.step})")
                for said in what_happened(member.run, member.kept_metrics):
                    print(said)
        if not self.where.agree(self.step):
            raise ValueError(
                f"the processes find checkpoints of different iterations in {self.members[0].run}: "
                "all nodes must see the same run folder"
            )
        return step is not None

    def newest(self, member: Member) -> int:
        return max(map(checkpoint.number_of, checkpoint.checkpoints(member.folder)), default=-1)

    def load(self, member: Member, path: Path) -> None:
        state = checkpoint.read_state(path)
        if state.get("dataset", member.dataset.fingerprint) != member.dataset.fingerprint:
            raise ValueError(
                f"{member.dataset.folder} is not the dataset that {member.run} was trained on; "
                "restore the dataset, or start another run"
            )
        if sharded.is_sharded(path) and isinstance(self.update, Plain):
            self.update.load_share(path)
        else:
            self.update.load(member.number, *sharded.read_whole(path))
        member.kept_metrics = state.get("metrics")
        if missing := member.state.keys() - state.keys():
            raise checkpoint.CheckpointError(f"{path}: its state has no {', '.join(missing)}")
        member.state = {key: state[key] for key in member.state}
        self.step, best = state["step"], state["best"]
        # The best checkpoint may be gone if this is not the newest one that was ever written.
        if best and not (member.folder / f"step-{best['step']:08d}").is_dir():
            member.state["best"] = {}

    # Numbers that are not finite ---------------------------------------------------------------

    def has_gone_back(self) -> bool:
        """Look for numbers that are not finite. A single run goes back to a checkpoint. One of
        several leaves the others, so that they need not go back with it."""
        failures = self.update.failures()
        for member in list(self.running):
            failure = failures[member.number]
            if failure is not None and len(self.members) == 1:
                self.roll_back(member, failure)
                return True
            if failure is not None:
                self.running.remove(member)
                self.say(
                    f"{member.run.name}: {failure}: not finite; it leaves the others and goes on "
                    "alone afterwards"
                )
        return False

    def roll_back(self, member: Member, failure: Failure) -> None:
        """Go back to the last checkpoint, and try again with half the learning rate."""
        rollbacks, factor = member.state["rollbacks"] + 1, member.state["rate_factor"] / 2
        if rollbacks > self.cfg.nan_retries:
            raise TrainingError(
                f"{failure}: not finite, after {rollbacks - 1} retries with smaller learning "
                f"rates. {self.newest(member)} is the last iteration that is kept. {WAY_OUT}",
                code=DIVERGED,
            )
        here = member.folder / f"step-{failure.step:08d}"
        self.where.barrier()
        if self.where.is_first and here.is_dir() and len(checkpoint.checkpoints(member.folder)) > 1:
            # Its weights give this loss whatever the learning rate, so an older one is needed.
            checkpoint.set_aside(here, "not-finite")
        self.where.barrier()
        path, _ = checkpoint.newest_valid(member.folder)
        if path is None:
            message = f"{failure}: not finite, and no checkpoint to go back to. {WAY_OUT}"
            raise TrainingError(message, code=DIVERGED)
        self.load(member, path)
        member.state |= {"rollbacks": rollbacks, "rate_factor": factor}
        if self.where.is_first:
            member.report.metrics.go_back(self.step)
        back = f"back to iteration {self.step}, learning rate x {factor:g}"
        self.say(f"{failure}: not finite; {back}")
