"""The configuration of a training run, with parts for model, data and optimiser."""

import math
from typing import Literal

from ..check import check, strict
from ..data.listops import ListOpsConfig
from ..data.masking import Masking
from ..model.config import ModelConfig


@strict
class DataConfig:
    """The dataset to train on. ListOps and Shakespeare are prepared if they are missing."""

    task: Literal["listops", "shakespeare", "text"] = "shakespeare"
    folder: str | None = None
    """Where the prepared dataset is. None: a folder named after the task in NRGPT_DATA (or ./data).
    For task = "text" it must exist: see `nrgpt data text --help`."""
    listops: ListOpsConfig = ListOpsConfig()
    order: Literal["random", "passes"] = "random"
    """Of the training texts. random: they begin at random places, and may overlap: after as many
    tokens as there are, 37 % have not been seen. passes: each pass over the data meets every token
    once, in a new order."""


@strict
class OptimiserConfig:
    name: Literal["adamw", "muon"] = "adamw"
    """muon: torch's Muon for the two-dimensional W matrices of the blocks, AdamW for the rest."""
    lr: float = 1e-3
    """AdamW's learning rate."""
    muon_lr: float = 0.02
    muon_eta: bool = False
    """Let Muon instead of AdamW update a matrix eta that all steps share. The norm of AdamW's
    updates of a D x D matrix grows with D, and eta begins at 1, so that with AdamW wide models
    learn only at small rates."""
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    """Of matrices only, not of gains, offsets, biases and single numbers."""
    clip: float | None = 1.0
    """Largest norm of the whole gradient; None does not clip."""
    warmup: int = 100
    """Iterations during which the learning rate rises from zero."""
    decay: Literal["cosine", "exponential", "linear", "constant"] = "cosine"
    final: float = 0.1
    """The learning rate at the last iteration, as a share of its largest."""

    def __post_init__(self) -> None:
        for name, is_fine, wanted in (
            ("lr", 0 < self.lr < math.inf, "positive and finite"),
            ("muon_lr", 0 < self.muon_lr < math.inf, "positive and finite"),
            ("beta1", 0 <= self.beta1 < 1, "in [0, 1)"),
            ("beta2", 0 <= self.beta2 < 1, "in [0, 1)"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("clip", self.clip is None or self.clip > 0, "positive, or None"),
            ("warmup", self.warmup >= 0, "at least 0"),
            ("final", 0 < self.final <= 1, "in (0, 1]"),
        ):
            check(is_fine, name, getattr(self, name), wanted)
        # An option that has no effect is refused, so that nobody believes it has one.
        for name, is_used, because in (
            ("muon_lr", self.name == "muon", "with name = 'adamw'"),
            ("muon_eta", self.name == "muon", "with name = 'adamw'"),
            ("final", self.decay != "constant", "with decay = 'constant'"),
        ):
            value, default = getattr(self, name), getattr(OptimiserConfig, name)
            wanted = f"{default} {because}, which has no use for it"
            check(is_used or value == default, name, value, wanted)


@strict
class TrainConfig:
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimiser: OptimiserConfig = OptimiserConfig()

    iterations: int = 5_000
    batch: int = 64
    """Sequences per update, over all processes."""
    accumulation: int = 1
    """Number of parts into which each process splits its share of a batch, to save memory."""
    seed: int = 0
    init_from: str | None = None
    """Begin with the weights of a run folder, of zoo:NAME, or of an export (hf:FOLDER). The shape
    and the tokenizer must be its own; a shorter context, another number of steps, other data and
    another optimiser are fine."""
    objective: Literal["next", "masked"] = "next"
    """next: predict the next token. masked: complete texts of which tokens are missing; the last
    token of model.vocab_size stands in their places, and only they count."""
    masked_share: float = 0.15
    """objective="masked": the share of tokens that are missing."""
    random_steps: tuple[int, ...] | None = None
    """(least, most): each update draws its number of inference steps from this range, so that the
    model may later be stopped early. None: always model.steps."""

    early_exits: float = 0.0
    """The share of tokens that each update reads at an earlier step, drawn for each token from
    first_exit on: so that early steps say something, and later ones have less to do."""
    first_exit: int = 1

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: a CUDA GPU if there is one, else the CPU. mps: the GPU of an Apple computer."""
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    """bf16: autocast, weights and sums stay in fp32. auto: bf16 on a GPU, but fp32 on a CPU, where
    bf16 is slow."""
    compile: bool = False
    graph: bool = False
    """Record an update as a CUDA graph and replay it, on one GPU. For small models, where launching
    kernels takes longer than running them. No effect on a CPU."""
    checkpoint_steps: bool = False
    """Recompute each inference step in the backward pass, so that it need not be kept in memory."""
    deterministic: bool = False
    """Use deterministic kernels only, which are slower on a GPU. A CPU run is always repeatable."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several processes share the work; fsdp also shards the weights."""

    sharded: bool = False
    """parallel="fsdp": every process writes and reads its own share of a checkpoint, for models
    whose weights and optimiser state no process could hold as a whole."""

    log_every: int = 20
    eval_every: int = 250
    eval_batches: int = 20
    """Random batches for the estimates during training; the end evaluates the whole split."""
    final_evaluation: bool = True
    """At the end, evaluate the whole validation split (and ListOps' tests), and write samples."""
    save_every: int = 250
    keep: int = 2
    """Checkpoints kept beside the best one."""
    nan_retries: int = 3
    """How often a loss that is not finite may send the run back to its last checkpoint. Each time
    the learning rate is halved."""
    tensorboard: bool = False
    wandb: bool = False
    plugins: tuple[str, ...] = ()
    """Modules with the run's own energies, as given by --plugin. They are only noted here: to load
    such a run, name them again."""

    def __post_init__(self) -> None:
        counted = ("iterations", "batch", "accumulation", "log_every", "eval_every")
        for name in (*counted, "eval_batches", "save_every", "keep"):
            value = getattr(self, name)
            check(value >= 1, name, value, "at least 1")
        divides = self.batch % self.accumulation == 0
        check(divides, "accumulation", self.accumulation, f"a divisor of batch = {self.batch}")
        check(0 <= self.seed < 2**63, "seed", self.seed, "at least 0 and below 2^63")
        check(self.nan_retries >= 0, "nan_retries", self.nan_retries, "at least 0")
        if (steps := self.random_steps) is not None:
            is_range = len(steps) == 2 and 1 <= steps[0] <= steps[1]
            check(is_range, "random_steps", steps, "(least, most) with 1 <= least <= most")
            fits = self.model.block != "gpt" or steps[1] <= self.model.steps
            check(fits, "random_steps", steps, "at most the blocks of this gpt")
        self.check_objective()
        check(0 <= self.early_exits < 1, "early_exits", self.early_exits, "in [0, 1)")
        least = self.model.steps if self.random_steps is None else self.random_steps[1]
        fits = 1 <= self.first_exit < max(2, least)
        check(fits, "first_exit", self.first_exit, f"at least 1 and less than {least} steps")
        idle = self.early_exits == 0 and self.first_exit != 1
        check(not idle, "first_exit", self.first_exit, "1 without early_exits")
        matrices = ("free", "free_per_term", "psd_skew", "state")
        has_eta = self.model.has_energy and self.model.rate in matrices
        check(
            has_eta or not self.optimiser.muon_eta,
            "optimiser.muon_eta",
            self.optimiser.muon_eta,
            f"False: block = {self.model.block!r} with rate = {self.model.rate!r} has no matrix "
            "eta that all steps share",
        )
        idle = self.sharded and self.parallel != "fsdp"
        check(not idle, "sharded", self.sharded, "False with parallel = 'ddp'")
        too_long = self.optimiser.warmup >= self.iterations
        check(not too_long, "optimiser.warmup", self.optimiser.warmup, "less than iterations")

    def check_objective(self) -> None:
        block, masked = self.model.block, self.objective == "masked"
        why = "'masked' with model.block = 'et', whose tokens see later ones"
        check(masked or block != "et", "objective", self.objective, why)
        check(0 < self.masked_share < 1, "masked_share", self.masked_share, "in (0, 1)")
        idle = not masked and self.masked_share != TrainConfig.masked_share
        check(not idle, "masked_share", self.masked_share, "left alone with objective = 'next'")
        if block == "ebt":  # which has a loss after each step, and a derivative inside
            for name in ("compile", "checkpoint_steps", "early_exits"):
                value, default = getattr(self, name), getattr(TrainConfig, name)
                check(value == default, name, value, f"{default} with model.block = 'ebt'")

    @property
    def masking(self) -> Masking | None:
        """How tokens go missing, if they do."""
        if self.objective == "next":
            return None
        return Masking(self.masked_share, self.model.vocab_size - 1)

    @property
    def more_tokens(self) -> int:
        """How many tokens the model needs besides those of the data."""
        return int(self.objective == "masked")


BOOKKEEPING = {
    "iterations", "log_every", "eval_every", "eval_batches", "final_evaluation", "save_every",
    "keep", "nan_retries", "tensorboard", "wandb", "device", "compile", "graph",
    "checkpoint_steps", "accumulation", "parallel", "sharded",
}  # fmt: skip
"""Fields that may differ when a run is resumed: none of them changes what is being learned.
(More iterations stretch the schedule of the learning rate; a message says so.)"""
