"""What decides a training run. Model, data and optimiser each have their own part."""

import math
from typing import Literal

from ..check import check, strict
from ..data.listops import ListOpsConfig
from ..model.config import ModelConfig


@strict
class DataConfig:
    """Which prepared dataset to train on; what can be made without asking is made if missing."""

    task: Literal["listops", "shakespeare", "text"] = "shakespeare"
    folder: str | None = None
    """Where the prepared dataset is. None: a folder named after the task below NRGPT_DATA (or
    ./data). For task = "text" it must exist: see `nrgpt data text --help`."""
    listops: ListOpsConfig = ListOpsConfig()


@strict
class OptimiserConfig:
    name: Literal["adamw", "muon"] = "adamw"
    """muon: torch's Muon for the blocks' two-dimensional W matrices, AdamW for the rest."""
    lr: float = 1e-3
    """Of AdamW."""
    muon_lr: float = 0.02
    muon_eta: bool = False
    """Muon also updates a matrix eta that all steps share (AdamW does otherwise). The norm of
    AdamW's updates of a D x D matrix grows with D, and eta begins at 1: wide models then learn at
    small rates only."""
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    """On matrices only: gains, offsets, biases and numbers are left alone."""
    clip: float | None = 1.0
    """Largest norm of the whole gradient; None does not clip."""
    warmup: int = 100
    """Iterations over which the learning rate rises from zero."""
    decay: Literal["cosine", "exponential", "linear", "constant"] = "cosine"
    final: float = 0.1
    """The learning rate at the last iteration, as a share of its largest."""

    def __post_init__(self) -> None:
        for name in ("lr", "muon_lr"):
            value = getattr(self, name)
            check(value > 0 and math.isfinite(value), name, value, "positive and finite")
        # Nobody should think that an option does something when it does not.
        for name, is_used, because in (
            ("muon_lr", self.name == "muon", "with name = 'adamw'"),
            ("muon_eta", self.name == "muon", "with name = 'adamw'"),
            ("final", self.decay != "constant", "with decay = 'constant'"),
        ):
            value, default = getattr(self, name), getattr(OptimiserConfig, name)
            wanted = f"{default} {because}, which has no use for it"
            check(is_used or value == default, name, value, wanted)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            check(0 <= value < 1, name, value, "in [0, 1)")
        check(self.weight_decay >= 0, "weight_decay", self.weight_decay, "at least 0")
        check(self.clip is None or self.clip > 0, "clip", self.clip, "positive, or None")
        check(self.warmup >= 0, "warmup", self.warmup, "at least 0")
        check(0 < self.final <= 1, "final", self.final, "in (0, 1]")


@strict
class TrainConfig:
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimiser: OptimiserConfig = OptimiserConfig()

    iterations: int = 5_000
    batch: int = 64
    """Sequences per update, over all processes."""
    accumulation: int = 1
    """Parts that each process computes its share of a batch in, to save memory."""
    seed: int = 0
    random_steps: tuple[int, ...] | None = None
    """(least, most): every update draws its number of inference steps from these, so that the
    model can be stopped early. None: always model.steps."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    """bf16 is autocast: weights and sums stay in fp32. auto: bf16 on a GPU, fp32 on a CPU, where
    bf16 is slow."""
    compile: bool = False
    graph: bool = False
    """On one GPU: record each update as a CUDA graph and replay it. For small models, where
    launching kernels takes longer than running them. A CPU has nothing to record."""
    checkpoint_steps: bool = False
    """Recompute each inference step in the backward pass: memory no longer grows with steps."""
    deterministic: bool = False
    """Only deterministic kernels (slower on a GPU); a CPU run repeats itself without."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several processes share the work; fsdp shards the weights too."""

    log_every: int = 20
    eval_every: int = 250
    eval_batches: int = 20
    """Random batches for the running estimates; the whole split is evaluated at the end."""
    save_every: int = 250
    keep: int = 2
    """Checkpoints kept beside the best one."""
    nan_retries: int = 3
    """Times that a loss that is not finite may send the run back to its last checkpoint, each
    with half the learning rate."""
    tensorboard: bool = False
    wandb: bool = False
    plugins: tuple[str, ...] = ()
    """Modules that register the run's own energies, as given by --plugin. Only a reminder: to load
    such a run, they must be named again."""

    def __post_init__(self) -> None:
        counted = ("iterations", "batch", "accumulation", "log_every", "eval_every")
        for name in (*counted, "eval_batches", "save_every", "keep"):
            value = getattr(self, name)
            check(value >= 1, name, value, "at least 1")
        divides = self.batch % self.accumulation == 0
        check(divides, "accumulation", self.accumulation, f"a divisor of batch = {self.batch}")
        check(0 <= self.seed < 2**63, "seed", self.seed, "at least 0 and below 2^63")
        check(self.nan_retries >= 0, "nan_retries", self.nan_retries, "at least 0")
        if self.random_steps is not None:
            is_range = len(self.random_steps) == 2 and self.random_steps[0] >= 1
            is_range = is_range and self.random_steps[0] <= self.random_steps[1]
            check(
                is_range, "random_steps", self.random_steps, "(least, most) with 1 <= least <= most"
            )
            deepest = self.random_steps[1]
            fits = self.model.block != "gpt" or deepest <= self.model.steps
            check(fits, "random_steps", self.random_steps, "at most the blocks of this gpt")
        matrices = ("free", "free_per_term", "psd_skew", "state")
        has_eta = self.model.block == "nrgpt" and self.model.rate in matrices
        check(
            has_eta or not self.optimiser.muon_eta,
            "optimiser.muon_eta",
            self.optimiser.muon_eta,
            f"False: block = {self.model.block!r} with rate = {self.model.rate!r} has no matrix "
            "eta that all steps share",
        )
        too_long = self.optimiser.warmup >= self.iterations
        check(not too_long, "optimiser.warmup", self.optimiser.warmup, "less than iterations")


BOOKKEEPING = {
    "iterations", "log_every", "eval_every", "eval_batches", "save_every", "keep", "nan_retries",
    "tensorboard", "wandb", "device", "compile", "graph", "checkpoint_steps", "accumulation",
    "parallel",
}  # fmt: skip
"""Fields that may differ when a run goes on: none of them changes what is being learned.
(More iterations stretch the schedule of the learning rate; the run says so.)"""
