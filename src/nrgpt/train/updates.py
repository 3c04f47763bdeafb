"""Three ways to compute an update: plain, recorded as a CUDA graph, and packed.

All three have the methods of ``Plain``, and the trainer in loop.py uses nothing else of them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.shards import to_device
from ..language_model import LanguageModel
from ..measure.loss import estimated_loss
from . import checkpoint, sharded
from .config import DataConfig, OptimiserConfig, TrainConfig
from .data import Streams
from .distributed import World, replicate, shard, synchronised
from .optim import make_optimisers, set_rate
from .packed_step import PackedStep
from .speed import autocast, forget_compiled

Configs = Sequence[TrainConfig]
Tensors = tuple[dict[str, Tensor], dict[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A loss or gradient was not finite. No weights were changed."""

    step: int
    loss: float
    norm: float

    def __str__(self) -> str:
        if math.isfinite(self.loss + self.norm):
            return f"iteration {self.step}: loss or gradient of another process"
        return f"iteration {self.step}: loss {self.loss:g}, gradient norm {self.norm:g}"


@dataclasses.dataclass(frozen=True)
class Batch:
    """The input of one update. Tensors are (runs, sequences, tokens)."""

    step: int
    x: Tensor
    y: Tensor
    inference_steps: int | None
    seeds: Sequence[int]
    """For dropout, one for each run."""
    rates: Sequence[float]
    """The learning rate of each run, as a share of its largest."""


def new_model(cfg: TrainConfig, where: World) -> LanguageModel:
    torch.manual_seed(cfg.seed)
    return LanguageModel(cfg.model).to(where.device)


def drawn_exits(
    cfg: TrainConfig, model: LanguageModel, idx: Tensor, steps: int | None
) -> Tensor | None:
    """When the tokens idx of one run are read; None: after all steps."""
    if cfg.early_exits == 0:
        return None
    return model.draw_exits(idx, cfg.early_exits, cfg.first_exit, steps=steps)


class Plain:
    """Holds the model and optimiser state of one run, and updates them: with torch's optimisers, in
    one process or several. The other kinds of update have the same methods, for several runs."""

    is_deferred = False
    """Whether ``failures`` waits for the device. If so, the trainer calls it only before it writes
    something."""

    def __init__(self, cfgs: Configs, where: World):
        cfg = cfgs[0]
        self.cfg, self.where = cfg, where
        self.own = new_model(cfg, where)
        self.own.checkpoint_steps = cfg.checkpoint_steps
        is_sharded = cfg.parallel == "fsdp" and where.size > 1
        if is_sharded:
            shard(self.own)
        self.optimisers = make_optimisers(self.own, cfg.optimiser, where.device)
        compiled: nn.Module = self.own
        if cfg.compile:
            forget_compiled()
            compiled = torch.compile(self.own)  # type: ignore[assignment]
        self.parallel = compiled if is_sharded else replicate(compiled, where)
        self.failure: Failure | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """Make an update; returns the losses of all runs, (runs,)."""
        torch.manual_seed(batch.seeds[0])
        loss, norm = self.gradients(batch)
        if self.where.any(not torch.isfinite(loss + norm)):
            self.failure = Failure(batch.step, loss.item(), norm.item())
            return loss[None]
        set_rate(self.optimisers, batch.rates[0])
        for optimiser in self.optimisers:
            optimiser.step()
        return loss[None]

    def gradients(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss of this process's share of the batch, and the norm of the gradient."""
        cfg = self.cfg
        self.own.train()
        self.own.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.where.device)
        count, steps = cfg.accumulation, batch.inference_steps
        exits = drawn_exits(cfg, self.own, batch.x[0], steps)
        options = {"steps": steps, "want_logits": False}
        parts = zip(batch.x[0].chunk(count), batch.y[0].chunk(count), strict=True)
        read_at = [None] * count if exits is None else exits.chunk(count)
        for i, (idx, targets) in enumerate(parts, 1):
            with synchronised(self.parallel, last=i == count):
                with autocast(cfg, self.where.device):
                    _, loss = self.parallel(idx, targets, exits=read_at[i - 1], **options)
                (loss / count).backward()
            total += loss.detach() / count
        largest = math.inf if cfg.optimiser.clip is None else cfg.optimiser.clip
        norm = torch.nn.utils.clip_grad_norm_(self.own.parameters(), largest)
        return total, checkpoint.gathered(norm)

    def failures(self) -> list[Failure | None]:
        """The first failure of each run since it was loaded."""
        return [self.failure]

    def estimates(self, streams: Streams, seeds: Sequence[int]) -> list[float]:
        """The mean loss of each run over ``eval_batches`` random batches, without dropout."""
        cfg, stream = self.cfg, streams.of_one
        sizes = {"batches": cfg.eval_batches, "size": cfg.batch}
        with autocast(cfg, self.where.device):
            return [estimated_loss(self.own, stream, seed=seeds[0], **sizes)]

    def model(self, number: int) -> LanguageModel:
        """The model of one run, for evaluation."""
        return self.own

    def tensors(self, number: int) -> Tensors:
        """Weights and optimiser state of one run, as checkpoints hold them."""
        # The weights come first, because FSDP shards them again only when they are asked for.
        weights = checkpoint.model_tensors(self.own)
        return weights, checkpoint.optimiser_tensors(self.own, self.optimisers)

    def load(self, number: int, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Load what ``tensors`` returned."""
        checkpoint.load_model_tensors(self.own, weights)
        checkpoint.load_optimiser_tensors(self.own, self.optimisers, state)
        self.failure = None

    def save_share(self, folder: Path, step: int, state: Mapping[str, Any]) -> None:
        """Write what this process holds into a checkpoint of all."""
        sharded.save(folder, step, self.own, self.optimisers, state, self.where)

    def load_share(self, path: Path) -> None:
        """Read what this process holds."""
        sharded.load(path, self.own, self.optimisers, self.where)
        self.failure = None


class Packed:
    """Several runs of one shape at once, batched by vmap; on a GPU recorded if asked for."""

    is_deferred = True

    def __init__(self, cfgs: Configs, where: World):
        cfg, device = cfgs[0], where.device
        self.cfg, self.device = cfg, device
        self.step = PackedStep(
            [new_model(own, where) for own in cfgs],
            [own.optimiser for own in cfgs],
            precision=lambda: autocast(cfg, device),
            compile=cfg.compile,
            graph=cfg.graph and device.type == "cuda",
        )

    def __call__(self, batch: Batch) -> Tensor:
        cfg, model, steps = self.cfg, self.step.model, batch.inference_steps
        masks, exits = [], []
        for seed, x in zip(batch.seeds, batch.x, strict=True):
            torch.manual_seed(seed)
            if (read_at := drawn_exits(cfg, model, x, steps)) is not None:
                exits.append(read_at)
            if cfg.model.dropout > 0:
                masks.append(model.draw_masks(*x.shape, steps=steps))
        stacked = [torch.stack(values) if values else None for values in (masks, exits)]
        rates = to_device(torch.tensor(batch.rates, dtype=torch.float64), self.device)
        losses, _ = self.step(batch.x, batch.y, stacked[0], stacked[1], rates, steps=steps)
        return losses

    def failures(self) -> list[Failure | None]:
        found = self.step.optimiser.failures.tolist()
        return [Failure(int(step), *rest) if step >= 0 else None for step, *rest in found]

    def estimates(self, streams: Streams, seeds: Sequence[int]) -> list[float]:
        cfg = self.cfg
        total = torch.zeros(len(seeds), device=self.device)
        for i in range(cfg.eval_batches):
            batch = streams.batch(seeds, step=i, size=cfg.batch, context=cfg.model.context)
            total += self.step.evaluate(*batch)
        return (total / cfg.eval_batches).tolist()

    def model(self, number: int) -> LanguageModel:
        model = LanguageModel(self.cfg.model).to(self.device)
        model.load_state_dict({name: value[number] for name, value in self.step.weights.items()})
        return model

    def tensors(self, number: int) -> Tensors:
        both = self.step.weights, self.step.optimiser.named_states()
        weights, state = (
            {name: value[number].detach().cpu().clone() for name, value in values.items()}
            for values in both
        )
        # AdamW of torch counts updates in float32.
        return weights, {n: v.float() if n.endswith("/step") else v for n, v in state.items()}

    @torch.no_grad()
    def load(self, number: int, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        checkpoint.check_names(self.step.weights, weights)
        for name, value in self.step.weights.items():
            value[number] = weights[name]
        # A plain run has no optimiser state before its first update.
        for name, value in self.step.optimiser.named_states().items():
            value[number] = state.get(name, 0)
        self.step.optimiser.failures[number] = -1


class Recorded(Packed):
    """One run whose updates are recorded as a CUDA graph and replayed: a pack of one, without vmap.
    It does not use torch's optimisers, because torch.optim.Muon turns its learning rate into a
    Python number, which would then be the same at every replay."""


def choose_update(cfgs: Configs, where: World) -> type[Plain | Packed]:
    """The update for these runs. Raises a ValueError if they ask for what cannot be combined."""
    cfg = cfgs[0]
    if len(cfgs) > 1:
        check_alike(cfgs)
        refuse(cfg, where, "packed runs", "train the runs one by one")
        return Packed
    if cfg.graph and where.device.type == "cuda":
        refuse(cfg, where, "graph = True", "set graph=false")
        return Recorded
    parts = where.size * cfg.accumulation
    if cfg.batch % parts:
        raise ValueError(
            f"batch = {cfg.batch}: must be a multiple of {where.size} processes x "
            f"accumulation = {cfg.accumulation}"
        )
    return Plain


def refuse(cfg: TrainConfig, where: World, what: str, way_out: str) -> None:
    """Raise an error if the configuration asks for what recorded and packed updates cannot do."""
    asked = [
        f"{name} = {getattr(cfg, name)!r}"
        for name in ("accumulation", "checkpoint_steps", "deterministic", "objective", "parallel")
        if getattr(cfg, name) != getattr(TrainConfig, name)
    ]
    if cfg.random_steps is not None and cfg.model.block == "gpt":
        # With fewer steps it skips blocks, and the optimiser would have to know which.
        asked.append(f"random_steps = {cfg.random_steps} with model.block = 'gpt'")
    if cfg.model.block == "ebt":  # a derivative inside each update, and a loss after each step
        asked.append("model.block = 'ebt'")
    if where.size > 1:
        asked.append(f"{where.size} processes")
    if where.device.type == "mps":  # it sums in float64, which Apple's GPUs do not have
        asked.append("device = 'mps'")
    if asked:
        asked_for = " and ".join(asked)
        raise ValueError(f"{asked_for}: cannot be combined with {what}; do without, or {way_out}")


def shape_of(cfg: TrainConfig) -> TrainConfig:
    """What packed runs must share: all but the seed, the data and the optimiser's numbers."""
    own = cfg.optimiser
    optimiser = OptimiserConfig(name=own.name, muon_eta=own.muon_eta, warmup=0)
    return dataclasses.replace(cfg, seed=0, optimiser=optimiser, data=DataConfig())


def by_shape(
    runs: Iterable[tuple[TrainConfig, Path]], most: Callable[[TrainConfig], int]
) -> list[list[tuple[TrainConfig, Path]]]:
    """Runs in packs of one shape, each with at most ``most`` runs."""
    groups: dict[str, list[tuple[TrainConfig, Path]]] = {}
    for cfg, run in runs:
        groups.setdefault(repr(shape_of(cfg)), []).append((cfg, run))
    return [
        group[i : i + limit]
        for group in groups.values()
        for limit in [most(group[0][0])]
        for i in range(0, len(group), limit)
    ]


def check_alike(cfgs: Configs) -> None:
    if any(shape_of(cfg) != shape_of(cfgs[0]) for cfg in cfgs[1:]):
        raise ValueError(
            "packed runs may differ in seed, data and the numbers of the optimiser only"
        )
    if cfgs[0].random_steps is not None and len({cfg.seed for cfg in cfgs}) > 1:
        raise ValueError(
            f"random_steps = {cfgs[0].random_steps}: packed runs take their steps together, and "
            "runs of different seeds draw different numbers of them; train the runs one by one"
        )
