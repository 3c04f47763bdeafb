"""Many runs of one shape, trained together: seeds, learning rates and the like in one process.

Each run keeps a folder of its own, with the files that its lone run would have; either kind can go
on where the other stopped. A run whose loss becomes not finite leaves the others, and goes on
alone when they are done, from its last checkpoint and with the lone run's rules.
"""

import dataclasses
import gc
import itertools
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.shards import TokenStream, to_device
from ..language_model import LanguageModel
from . import checkpoint
from .config import DataConfig, OptimiserConfig, TrainConfig
from .data import keep_tokenizer, open_dataset, prepare_dataset
from .distributed import world
from .faults import INTERRUPTED, Interrupt, TrainingError, only_process
from .loop import check_config, seed_of_step, steps_of_update, train
from .optim import rate_at
from .packed_step import PackedStep
from .precision import autocast
from .report import Report
from .result import write_result
from .speed import matrix_product_rate, training_flops_per_token


def shape_of(cfg: TrainConfig) -> TrainConfig:
    """What runs must share to be packed: all but the seed, the optimiser's numbers and the data."""
    own = cfg.optimiser
    optimiser = OptimiserConfig(name=own.name, muon_eta=own.muon_eta, warmup=0)
    return dataclasses.replace(cfg, seed=0, optimiser=optimiser, data=DataConfig())


def train_packed(cfgs: Sequence[TrainConfig], runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Train every configuration in its folder; returns their results."""
    check_packable(cfgs, runs)
    with ExitStack() as stack:
        where = stack.enter_context(world(cfgs[0].device))
        if where.size > 1:
            raise ValueError("packed training is for one process; give each its own runs")
        interrupt = stack.enter_context(Interrupt().watching())
        for run in runs:
            stack.enter_context(only_process(run))
        for data in dict.fromkeys(cfg.data for cfg in cfgs):
            prepare_dataset(data)
            open_dataset(data, cfgs[0].model.vocab_size)
        for cfg, run in zip(cfgs, runs, strict=True):
            check_config(cfg, run)
        left_over = Pack(cfgs, runs, where.device, interrupt).fit()
        gc.collect()  # what was recorded on a GPU, before the next pack comes
    for number in left_over:
        interrupt.heed()
        train(cfgs[number], runs[number])
    return [json.loads((run / "result.json").read_text()) for run in runs]


def train_one(cfg: TrainConfig, run: Path) -> dict[str, Any]:
    """Train one configuration as fast as can be: recorded, if that is asked for and possible."""
    single = int(os.environ.get("WORLD_SIZE", "1")) == 1 and cfg.accumulation == 1
    # A gpt that takes fewer steps leaves blocks out, and an optimiser knows which it left out.
    is_whole = cfg.random_steps is None or cfg.model.block != "gpt"
    on_gpu = cfg.device != "cpu" and torch.cuda.is_available()
    is_plain = is_whole and not cfg.checkpoint_steps and not cfg.deterministic
    if cfg.graph and single and on_gpu and is_plain:
        return train_packed([cfg], [run])[0]
    return train(cfg, run)


def check_packable(cfgs: Sequence[TrainConfig], runs: Sequence[Path]) -> None:
    if not cfgs or len(cfgs) != len(runs) or len(set(runs)) != len(runs):
        raise ValueError("packed training needs a folder of its own for each of one or more runs")
    for cfg in cfgs[1:]:
        if shape_of(cfg) != shape_of(cfgs[0]):
            raise ValueError(
                "packed runs may differ in seed, data and the numbers of the optimiser only"
            )
    if cfgs[0].random_steps is not None and len({cfg.seed for cfg in cfgs}) > 1:
        raise ValueError(
            "random_steps: packed runs take their steps together, and runs of different seeds draw "
            "different numbers of them; train one by one"
        )
    if cfgs[0].random_steps is not None and cfgs[0].model.block == "gpt":
        raise ValueError("random_steps: a gpt with them leaves blocks out; train one by one")
    for name in ("checkpoint_steps", "deterministic"):
        if getattr(cfgs[0], name):
            raise ValueError(f"{name} = True: packed training does without; train one by one")
    if cfgs[0].accumulation != 1:
        raise ValueError(f"accumulation = {cfgs[0].accumulation}: must be 1 for packed training")


class Streams:
    """The tokens that runs draw their batches from, some from the same ones, one after the other
    in one place: a batch for all runs is then one gather."""

    def __init__(self, streams: Sequence[TokenStream], device: torch.device):
        self.streams = streams
        distinct = list(dict.fromkeys(streams))
        ends = list(itertools.accumulate(map(len, distinct), initial=0))
        self.begins = [ends[distinct.index(stream)] for stream in streams]
        together = TokenStream("all", [shard for stream in distinct for shard in stream.shards])
        self.together = together.resident(device) if device.type == "cuda" else together

    def windows(self, seeds: Sequence[int], *, step: int, size: int, context: int) -> Tensor:
        """(runs x size, context + 1): where the lone run of each seed has them."""
        starts = [
            begin + stream.starts_of(seed=seed, step=step, size=size, context=context)
            for begin, stream, seed in zip(self.begins, self.streams, seeds, strict=True)
        ]
        return self.together.windows(np.concatenate(starts), context + 1)


class Pack:
    def __init__(
        self,
        cfgs: Sequence[TrainConfig],
        runs: Sequence[Path],
        device: torch.device,
        interrupt: Interrupt,
    ):
        self.cfgs, self.runs, self.device, self.interrupt = cfgs, runs, device, interrupt
        self.cfg = cfgs[0]
        opened = {
            data: open_dataset(data, self.cfg.model.vocab_size, verify=False)
            for data in dict.fromkeys(cfg.data for cfg in cfgs)
        }
        self.datasets = [opened[cfg.data] for cfg in cfgs]
        """Of each run; the same object where it is the same dataset."""
        self.train_tokens, self.val_tokens = (
            Streams(self.streams_of(split), device) for split in ("train", "val")
        )
        models = []
        for cfg in cfgs:
            torch.manual_seed(cfg.seed)
            models.append(LanguageModel(cfg.model).to(device))
        self.update = PackedStep(
            models,
            [cfg.optimiser for cfg in cfgs],
            precision=lambda: autocast(self.cfg, device),
            compile=self.cfg.compile,
            graph=self.cfg.graph and device.type == "cuda",
        )
        self.template = LanguageModel(self.cfg.model).to(device)
        """Takes the weights of one run after the other, for what is done one by one."""
        self.states: list[dict[str, Any]] = [
            {"rate_factor": 1.0, "rollbacks": 0, "best": {}, "dataset": dataset.fingerprint}
            for dataset in self.datasets
        ]
        self.running = list(range(len(cfgs)))
        """The runs that have not met a number that is not finite."""
        self.is_fine = torch.ones(len(cfgs), dtype=torch.bool, device=device)
        self.step = self.resume()  # refuses another dataset
        for run, dataset in zip(runs, self.datasets, strict=True):
            keep_tokenizer(run, dataset)
        self.reports = [
            Report(run, cfg, self.step, quiet=False, show=number == 0)
            for number, (cfg, run) in enumerate(zip(cfgs, runs, strict=True))
        ]

    def fit(self) -> list[int]:
        """Train to the end; returns the runs that left."""
        cfg = self.cfg
        try:
            self.flops = training_flops_per_token(cfg.model, cfg.batch)
            self.peak = matrix_product_rate(self.device, cfg.precision)
            if self.step == 0:
                self.save()
            since, tokens_since = time.perf_counter(), 0
            while self.step < cfg.iterations and self.running:
                losses = self.iterate()
                tokens_since += cfg.batch * cfg.model.context
                stop, last = self.interrupt.received, self.step == cfg.iterations
                due = (cfg.log_every, cfg.eval_every, cfg.save_every)
                if stop or last or any(self.step % every == 0 for every in due):
                    self.part_with_the_bad()
                if self.step % cfg.log_every == 0:
                    values = losses.tolist()  # waits for the device
                    self.log(values, tokens_since / (time.perf_counter() - since))
                    since, tokens_since = time.perf_counter(), 0
                if self.step % cfg.eval_every == 0 or last:
                    self.evaluate()
                    since, tokens_since = time.perf_counter(), 0
                if stop or self.step % cfg.save_every == 0 or last:
                    self.save()
                if stop and self.step < cfg.iterations:
                    message = f"{stop}: saved at step {self.step}; run the same command to go on"
                    raise TrainingError(message, code=INTERRUPTED)
            for number in self.running:
                self.say(f"evaluating {self.runs[number].name}")
                model, state = self.model_of(number), {"step": self.step, **self.states[number]}
                dataset, cfg = self.datasets[number], self.cfgs[number]
                write_result(self.runs[number], model, dataset, cfg, state)
        finally:
            for report in self.reports:
                report.close()
        return [number for number in range(len(self.cfgs)) if number not in self.running]

    def streams_of(self, split: str) -> list[TokenStream]:
        found = {id(dataset): dataset.tokens(split) for dataset in self.datasets}
        return [found[id(dataset)] for dataset in self.datasets]

    def batches(self, streams: Streams, seeds: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all runs, (runs, batch, tokens), as their lone runs draw them."""
        size, context = self.cfg.batch, self.cfg.model.context
        windows = streams.windows(seeds, step=step, size=size, context=context)
        windows = to_device(windows.unflatten(0, (len(seeds), size)), self.device)
        return windows[..., :-1].contiguous(), windows[..., 1:].contiguous()

    def iterate(self) -> Tensor:
        """One update of all runs. Batches and dropout are those of the lone runs."""
        x, y = self.batches(self.train_tokens, [cfg.seed for cfg in self.cfgs], self.step)
        steps, masks = steps_of_update(self.cfg, self.step), []
        if self.cfg.model.dropout > 0:
            for cfg in self.cfgs:
                torch.manual_seed(seed_of_step(cfg.seed, self.step, 0))
                masks.append(self.template.draw_masks(*x.shape[1:], steps=steps))
        factors = [state["rate_factor"] for state in self.states]
        rates = [
            factor * rate_at(self.step, cfg.iterations, cfg.optimiser)
            for factor, cfg in zip(factors, self.cfgs, strict=True)
        ]
        losses, fine = self.update(
            x,
            y,
            torch.stack(masks) if masks else None,
            to_device(torch.tensor(rates, dtype=torch.float64), self.device),
            steps=steps,
        )
        self.is_fine &= fine
        self.step += 1
        return losses

    def part_with_the_bad(self) -> None:
        """Looked at before anything is written only: asking a GPU after each update would make it
        wait. Their updates have been left out since."""
        for number in [n for n, fine in enumerate(self.is_fine.tolist()) if not fine]:
            if number in self.running:
                self.running.remove(number)
                self.say(
                    f"{self.runs[number].name}: up to step {self.step}: a loss or gradient was not "
                    "finite; it leaves the others and goes on alone afterwards"
                )

    def model_of(self, number: int) -> LanguageModel:
        """The model of one run, until the next one is asked for."""
        weights = {name: value[number] for name, value in self.update.weights.items()}
        self.template.load_state_dict(weights)
        return self.template

    def log(self, losses: list[float], tokens_per_second: float) -> None:
        """``tokens_per_second`` are those of one run while it shares the machine."""
        utilisation = len(self.running) * tokens_per_second * self.flops / self.peak
        for number in self.running:
            cfg, factor = self.cfgs[number], self.states[number]["rate_factor"]
            rate = rate_at(self.step - 1, cfg.iterations, cfg.optimiser)
            self.reports[number].log(
                self.step,
                loss=losses[number],
                lr=factor * rate * cfg.optimiser.lr,
                tokens_per_second=tokens_per_second,
                mfu=utilisation,
            )

    def evaluate(self) -> None:
        """Running estimates of all runs together; remembers the best of each."""
        losses = {
            "train_loss": self.estimates(self.train_tokens),
            "val_loss": self.estimates(self.val_tokens),
        }
        improved = []
        for number in self.running:
            own = {name: values[number] for name, values in losses.items()}
            self.reports[number].log(self.step, **own)
            state = self.states[number]
            if own["val_loss"] < state["best"].get("val_loss", float("inf")):
                state["best"] = {"step": self.step, "val_loss": own["val_loss"]}
                improved.append(number)
        self.save(improved)

    def estimates(self, streams: Streams) -> list[float]:
        """``estimated_loss`` of each run, on the batches that its lone run would take."""
        seeds = [cfg.seed + 1 for cfg in self.cfgs]
        total = torch.zeros(len(seeds), device=self.device)
        for i in range(self.cfg.eval_batches):
            total += self.update.evaluate(*self.batches(streams, seeds, i))
        return (total / self.cfg.eval_batches).tolist()

    def say(self, text: str) -> None:
        self.reports[0].say(text)

    # Checkpoints -------------------------------------------------------------------------------

    def save(self, numbers: Sequence[int] | None = None) -> None:
        for number in self.running if numbers is None else numbers:
            weights, optimiser = self.update.tensors(number)
            folder, state = self.runs[number] / "checkpoints", self.states[number]
            checkpoint.save_checkpoint(folder, self.step, weights, optimiser, state)
            checkpoint.prune(folder, self.cfg.keep, state["best"].get("step"))

    def resume(self) -> int:
        """The newest step of which every run has a valid checkpoint; 0 to begin."""
        for run in self.runs:
            for fault in checkpoint.tidy(run / "checkpoints"):
                print(f"damaged checkpoint set aside: {fault}")
        valid = [
            {path.name for path in checkpoint.checkpoints(run / "checkpoints")} for run in self.runs
        ]
        if not any(valid):
            return 0
        common = set.intersection(*valid)
        if not common:
            raise ValueError(
                "the runs to be packed have no checkpoint of one and the same step; go on with "
                "them one by one (nrgpt train ... --to FOLDER)"
            )
        name = max(common)
        for number, run in enumerate(self.runs):
            weights, optimiser, state = checkpoint.load_checkpoint(run / "checkpoints" / name)
            self.update.load(number, weights, optimiser)
            checked = checkpoint.checked_state(state, run, self.datasets[number])
            self.states[number] = {key: checked[key] for key in self.states[number]}
            print(f"going on from {run / 'checkpoints' / name}")
        return int(name.removeprefix("step-"))
