"""The training loop.

Everything random in iteration t is a function of (seed, t, rank): the batch, and the dropout, whose
generator is seeded anew for every iteration. So a run that goes on from a checkpoint needs nothing
but weights, optimiser state and the number of the iteration, and equals the uninterrupted run bit
for bit.
"""

import dataclasses
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..check import from_dict
from ..files import write_atomically
from ..language_model import LanguageModel
from ..measure.loss import estimated_loss
from . import checkpoint
from .config import BOOKKEEPING, TrainConfig
from .data import keep_tokenizer, open_dataset, prepare_dataset
from .distributed import World, replicate, shard, synchronised, world
from .faults import DIVERGED, INTERRUPTED, Interrupt, TrainingError, only_process
from .optim import make_optimisers, rate_at, set_rate
from .precision import autocast
from .report import Report, environment
from .result import write_result
from .speed import forget_compiled, matrix_product_rate, training_flops_per_token


def train(cfg: TrainConfig, run: Path) -> dict[str, Any]:
    """Train, or go on training, in the folder ``run``; returns the final results."""
    with ExitStack() as stack:
        where = stack.enter_context(world(cfg.device))
        interrupt = stack.enter_context(Interrupt().watching())
        if where.is_first:
            stack.enter_context(only_process(run))
            prepare_dataset(cfg.data)
            open_dataset(cfg.data, cfg.model.vocab_size)  # checked whole before anything is written
            check_config(cfg, run)
        where.barrier()
        if cfg.deterministic:
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        return Trainer(cfg, run, where, interrupt).fit()


def check_config(cfg: TrainConfig, run: Path) -> None:
    """Write RUN/config.json, or refuse to go on with a run of another configuration."""
    path = run / "config.json"
    if path.exists():
        differ = differences(path, cfg)
        if "iterations" in differ:
            print(f"{differ['iterations']}: the learning rate's schedule stretches with it")
        changed = [text for name, text in differ.items() if name not in BOOKKEEPING]
        if changed:
            raise ValueError(
                f"{run} holds a run of another configuration ({'; '.join(changed)}); choose "
                "another folder with --to, or remove this one"
            )
    write_atomically(path, json.dumps(dataclasses.asdict(cfg), indent=1))
    write_atomically(run / "environment.json", json.dumps(environment(), indent=1))


def differences(path: Path, cfg: TrainConfig) -> dict[str, str]:
    """Where a configuration on disk is not this one, by field. One from before a field was there
    has its default."""
    try:
        stored = from_dict(TrainConfig, json.loads(path.read_text()))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: no configuration ({error}); put back the one it was, or choose another folder"
        ) from error
    before, now = flatten(dataclasses.asdict(stored)), flatten(dataclasses.asdict(cfg))
    return {
        name: f"{name}: {before[name]!r} -> {value!r}"
        for name, value in now.items()
        if before[name] != value
    }


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """What the random generator starts an iteration with."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])


def steps_of_update(cfg: TrainConfig, step: int) -> int | None:
    """The number of inference steps, the same in all processes."""
    if cfg.random_steps is None:
        return None
    least, most = cfg.random_steps
    return int(np.random.default_rng([cfg.seed, step, 1]).integers(least, most + 1))


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


class Trainer:
    def __init__(self, cfg: TrainConfig, run: Path, where: World, interrupt: Interrupt):
        self.cfg, self.run, self.where, self.interrupt = cfg, run, where, interrupt
        if cfg.batch % (where.size * cfg.accumulation):
            raise ValueError(
                f"batch = {cfg.batch}: must be a multiple of {where.size} processes x "
                f"accumulation = {cfg.accumulation}"
            )
        # Every byte has been checked by the first process, which the others waited for.
        self.dataset = open_dataset(cfg.data, cfg.model.vocab_size, verify=False)
        self.train_tokens = self.dataset.tokens("train")
        self.val_tokens = self.dataset.tokens("val")
        if where.device.type == "cuda":
            self.train_tokens = self.train_tokens.resident(where.device)
        torch.manual_seed(cfg.seed)
        self.model = LanguageModel(cfg.model).to(where.device)
        self.model.checkpoint_steps = cfg.checkpoint_steps
        is_sharded = cfg.parallel == "fsdp" and where.size > 1
        if is_sharded:
            shard(self.model)
        self.optimisers = make_optimisers(self.model, cfg.optimiser, where.device)
        self.step = 0
        self.rate_factor = 1.0
        self.rollbacks = 0
        self.best: dict[str, float] = {}
        self.resume()  # refuses another dataset
        if where.is_first:
            keep_tokenizer(run, self.dataset)
        compiled: nn.Module = self.model
        if cfg.compile:
            forget_compiled()
            compiled = torch.compile(self.model)  # type: ignore[assignment]
        self.parallel = compiled if is_sharded else replicate(compiled, where)
        self.report = Report(run, cfg, self.step, quiet=not where.is_first)

    # The life of a run -------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        cfg = self.cfg
        try:
            self.measure_speed()
            if self.step == 0:
                self.save()
            since, tokens_since = time.perf_counter(), 0
            while self.step < cfg.iterations:
                loss = self.update()
                tokens_since += cfg.batch * cfg.model.context
                if self.step % cfg.log_every == 0:
                    seconds = time.perf_counter() - since
                    self.log(self.where.mean(loss).item(), tokens_since / seconds)
                    since, tokens_since = time.perf_counter(), 0
                if self.step % cfg.eval_every == 0 or self.step == cfg.iterations:
                    self.evaluate()
                    since, tokens_since = time.perf_counter(), 0
                stop = self.where.any(self.interrupt.received is not None)
                if stop or self.step % cfg.save_every == 0 or self.step == cfg.iterations:
                    self.save()
                if stop and self.step < cfg.iterations:
                    name = self.interrupt.received or "a signal to another process"
                    message = f"{name}: saved at step {self.step}; run the same command to go on"
                    raise TrainingError(message, code=INTERRUPTED)
            return self.finish()
        finally:
            self.report.close()

    def finish(self) -> dict[str, Any]:
        """Measure what is measured once, and write RUN/result.json."""
        self.report.say("evaluating the whole validation split")
        state = {"step": self.step, "rollbacks": self.rollbacks, "best": self.best}
        run = self.run if self.where.is_first else None
        result = write_result(run, self.model, self.dataset, self.cfg, state)
        self.where.barrier()
        return result

    # One iteration -----------------------------------------------------------------------------

    def update(self) -> Tensor:
        """One update of the weights. Nothing is changed by a loss or gradient that is not finite:
        the run goes back to its last checkpoint and tries again with half the learning rate."""
        while True:
            loss, norm = self.gradients()
            is_finite = bool(torch.isfinite(loss + norm))
            if not self.where.any(not is_finite):
                break
            self.roll_back(loss, norm)
        set_rate(self.optimisers, self.rate_factor * self.rate())
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        return loss

    def gradients(self) -> tuple[Tensor, Tensor]:
        """The mean loss of this process's share of the batch, and the norm of the gradient."""
        cfg, where = self.cfg, self.where
        torch.manual_seed(seed_of_step(cfg.seed, self.step, where.rank))
        x, y = self.train_tokens.batch(
            seed=cfg.seed,
            step=self.step,
            size=cfg.batch,
            context=cfg.model.context,
            rank=where.rank,
            world=where.size,
        )
        steps = steps_of_update(cfg, self.step)
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        total = torch.zeros((), device=where.device)
        parts = list(zip(x.chunk(cfg.accumulation), y.chunk(cfg.accumulation), strict=True))
        for i, (idx, targets) in enumerate(parts):
            idx = idx.to(where.device, non_blocking=True)
            targets = targets.to(where.device, non_blocking=True)
            with synchronised(self.parallel, last=i == len(parts) - 1):
                with autocast(self.cfg, self.where.device):
                    _, loss = self.parallel(idx, targets, steps=steps, want_logits=False)
                (loss / len(parts)).backward()
            total += loss.detach() / len(parts)
        largest = self.cfg.optimiser.clip if self.cfg.optimiser.clip is not None else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        return total, checkpoint.gathered(norm)

    def rate(self) -> float:
        return rate_at(self.step, self.cfg.iterations, self.cfg.optimiser)

    # Measuring ---------------------------------------------------------------------------------

    def measure_speed(self) -> None:
        together = self.cfg.batch // (self.cfg.accumulation * self.where.size)
        self.flops = training_flops_per_token(self.cfg.model, together)
        self.peak = matrix_product_rate(self.where.device, self.cfg.precision)

    def log(self, loss: float, tokens_per_second: float) -> None:
        per_process = tokens_per_second / self.where.size
        self.report.log(
            self.step,
            loss=loss,
            lr=self.optimisers[-1].param_groups[0]["lr"],
            tokens_per_second=tokens_per_second,
            mfu=per_process * self.flops / self.peak,
        )

    def evaluate(self) -> None:
        """Running estimates on fixed random batches; remembers the best."""
        cfg = self.cfg
        losses = {}
        with autocast(self.cfg, self.where.device):
            for name, stream in (("train", self.train_tokens), ("val", self.val_tokens)):
                losses[f"{name}_loss"] = estimated_loss(
                    self.model, stream, batches=cfg.eval_batches, size=cfg.batch, seed=cfg.seed + 1
                )
        self.report.log(self.step, **losses)
        if losses["val_loss"] < self.best.get("val_loss", float("inf")):
            self.best = {"step": self.step, "val_loss": losses["val_loss"]}
            self.save()

    # Checkpoints -------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.run / "checkpoints"

    def save(self) -> None:
        weights = checkpoint.model_tensors(self.model)
        optimiser = checkpoint.optimiser_tensors(self.model, self.optimisers)
        state = {
            "rate_factor": self.rate_factor,
            "rollbacks": self.rollbacks,
            "best": self.best,
            "dataset": self.dataset.fingerprint,
        }
        if self.where.is_first:
            checkpoint.save_checkpoint(self.folder, self.step, weights, optimiser, state)
            best = self.best.get("step")
            checkpoint.prune(self.folder, self.cfg.keep, None if best is None else int(best))
        self.where.barrier()

    def resume(self) -> None:
        if self.where.is_first:
            for fault in checkpoint.tidy(self.folder):
                print(f"damaged checkpoint set aside: {fault}")
        self.where.barrier()
        path, _ = checkpoint.newest_valid(self.folder)
        if path is not None:
            self.load(path)
            if self.where.is_first:
                print(f"going on from {path} (step {self.step})")
        if not self.where.agree(self.step):
            raise ValueError(
                f"the processes find checkpoints of different steps in {self.run}: all nodes must "
                "see the same run folder"
            )

    def load(self, path: Path) -> None:
        weights, optimiser, state = checkpoint.load_checkpoint(path)
        checkpoint.load_model_tensors(self.model, weights)
        checkpoint.load_optimiser_tensors(self.model, self.optimisers, optimiser)
        state = checkpoint.checked_state(state, self.run, self.dataset)
        self.step = state["step"]
        self.rate_factor = state["rate_factor"]
        self.rollbacks = state["rollbacks"]
        self.best = state["best"]

    def roll_back(self, loss: Tensor, norm: Tensor) -> None:
        what = f"step {self.step}: loss {loss.item():g}, gradient norm {norm.item():g}"
        if torch.isfinite(loss + norm):
            what = f"step {self.step}: loss or gradient of another process"
        rollbacks, factor = self.rollbacks + 1, self.rate_factor / 2
        if rollbacks > self.cfg.nan_retries:
            raise TrainingError(
                f"{what}: not finite, after {self.rollbacks} retries with smaller learning rates. "
                "The checkpoint before is kept. Try a smaller optimiser.lr, a longer warm-up, "
                "or precision = fp32",
                code=DIVERGED,
            )
        here = self.folder / f"step-{self.step:08d}"
        self.where.barrier()
        if self.where.is_first and here.is_dir():
            # Its weights give this very loss: no learning rate helps, only an older checkpoint.
            checkpoint.set_aside(here, "not-finite")
        self.where.barrier()
        path, _ = checkpoint.newest_valid(self.folder)
        if path is None:
            raise TrainingError(f"{what}: not finite, and no checkpoint to go back to", DIVERGED)
        self.load(path)
        self.rollbacks, self.rate_factor = rollbacks, factor
        self.report.drop_after(self.step)
        self.report.say(f"{what}: not finite; back to step {self.step}, learning rate x {factor:g}")
