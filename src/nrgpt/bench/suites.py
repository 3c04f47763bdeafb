"""What is measured. Sizes are those of the paper's models on a GPU, and small ones on a CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..config import ModelConfig
from ..decoder import CacheKind, Decoder
from ..flops import flops_per_token
from ..model import LanguageModel
from ..train.config import OptimiserConfig
from ..train.optim import make_optimisers
from ..train.packed_step import PackedStep
from .measure import Report, Work, compare
from .textbook import autograd_model, textbook_model


class Step:
    """A training step as `nrgpt train` makes it: both passes, clipping, optimiser."""

    def __init__(
        self,
        model: LanguageModel,
        batch: int,
        device: torch.device,
        *,
        compile: bool = False,
        optimiser: Literal["adamw", "muon"] = "adamw",
    ):
        cfg = model.cfg
        self.model = model.to(device)
        self.called: Any = torch.compile(self.model) if compile else self.model
        settings = OptimiserConfig(name=optimiser)
        self.optimisers = make_optimisers(self.model, settings, device)
        text = torch.randint(cfg.vocab_size, (batch, cfg.context + 1), device=device)
        self.idx, self.targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        self.precision: Callable[[], Any] = nullcontext
        if device.type == "cuda":
            self.precision = lambda: torch.autocast("cuda", dtype=torch.bfloat16)

    def loss(self) -> Tensor:
        with self.precision():
            _, loss = self.called(self.idx, self.targets, want_logits=False)
        return loss

    def __call__(self) -> None:
        self.model.zero_grad()
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()

    def work(self, note: str = "") -> Work:
        batch = len(self.idx)
        flops = flops_per_token(self.model.cfg, batch=batch)
        return Work(self, batch * self.model.cfg.context, flops, note)


def describe(cfg: ModelConfig, batch: int) -> str:
    sizes = f"width {cfg.width}, {cfg.heads} heads, {cfg.steps} steps"
    return f"{sizes}, batch {batch} x {cfg.context}, vocabulary {cfg.vocab_size:,}"


def precision_of(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def large(device: torch.device) -> tuple[ModelConfig, int]:
    if device.type == "cuda":
        return ModelConfig(vocab_size=50_304), 32
    return ModelConfig(vocab_size=65, context=256, width=256, heads=8, steps=8), 4


def train(device: torch.device, *, compile: bool) -> list[Report]:
    """A training step against autograd inside, and against the baselines."""
    cfg, batch = large(device)
    models = {
        "autograd, textbook": textbook_model(cfg),
        "autograd, our energies": autograd_model(cfg),
        "nrgpt": LanguageModel(cfg),
        "nrgpt, full rank": LanguageModel(replace(cfg, coupling="full")),
        "gpt": LanguageModel(replace(cfg, block="gpt")),
        "rgpt_parallel": LanguageModel(replace(cfg, block="rgpt_parallel")),
    }
    works = {}
    for name, model in models.items():
        by_autograd = "autograd" in name
        step = Step(model, batch, device, compile=compile and not by_autograd)
        works[name] = step.work("compiled" if compile and not by_autograd else "")
    title = f"training step, {describe(cfg, batch)}"
    return [compare("train", title, works, device, precision_of(device))]


def small(device: torch.device, *, compile: bool) -> list[Report]:
    """The sizes of Shakespeare and ListOps, where launches cost more than arithmetic."""
    is_cuda = device.type == "cuda"
    sizes = {
        "Shakespeare": (
            ModelConfig(vocab_size=65, context=256, width=128, heads=4, steps=8),
            64 if is_cuda else 4,
        ),
        "ListOps": (
            ModelConfig(vocab_size=17, context=128, width=64, heads=4, steps=5),
            64 if is_cuda else 8,
        ),
    }
    reports = []
    for name, (cfg, batch) in sizes.items():
        works = {}
        for block in ("nrgpt", "gpt", "rgpt_parallel"):
            model = LanguageModel(replace(cfg, block=block))
            works[block] = Step(model, batch, device, compile=compile).work()
        works["nrgpt, Muon"] = Step(
            LanguageModel(cfg), batch, device, compile=compile, optimiser="muon"
        ).work()
        title = f"{name}, {describe(cfg, batch)}"
        reports.append(compare("small", title, works, device, precision_of(device)))
    return reports


def packed(device: torch.device, *, compile: bool) -> list[Report]:
    """Sixteen runs packed into one, against one and against sixteen one by one."""
    cfg = ModelConfig(vocab_size=17, context=128, width=64, heads=4, steps=5)
    batch, runs = (64, 16) if device.type == "cuda" else (4, 16)
    works = {}
    for count in (1, runs):
        models = [LanguageModel(cfg).to(device) for _ in range(count)]
        step = PackedStep(models, [OptimiserConfig()] * count)
        idx = torch.randint(cfg.vocab_size, (count, batch, cfg.context), device=device)
        rates = torch.ones(count, dtype=torch.float64, device=device)
        precision = Step(LanguageModel(cfg), 1, device).precision

        def update(
            step: PackedStep = step,
            idx: Tensor = idx,
            rates: Tensor = rates,
            precision: Callable[[], Any] = precision,
        ) -> None:
            with precision():
                step(idx, idx, None, rates)

        tokens = count * batch * cfg.context
        works[f"{count} packed"] = Work(update, tokens, flops_per_token(cfg, batch=batch))
    lone = [Step(LanguageModel(cfg), batch, device) for _ in range(runs)]

    def one_by_one() -> None:
        for step in lone:
            step()

    works[f"{runs} one by one"] = Work(
        one_by_one,
        runs * batch * cfg.context,
        flops_per_token(cfg, batch=batch),
    )
    title = f"packed training, {describe(cfg, batch)}"
    return [compare("packed", title, works, device, precision_of(device))]


def generate(device: torch.device, *, compile: bool) -> list[Report]:
    """A new token after a long text: without a cache, with the frozen one, with the exact one."""
    is_cuda = device.type == "cuda"
    cfg = (
        ModelConfig(vocab_size=50_304)
        if is_cuda
        else ModelConfig(vocab_size=65, context=512, width=256, heads=8, steps=8)
    )
    model = LanguageModel(cfg).to(device).eval()
    if is_cuda:
        model = model.bfloat16()
    reports = []
    for rows in (1, 64) if is_cuda else (1, 8):
        prompts = torch.randint(cfg.vocab_size, (rows, cfg.context - 128)).tolist()
        works = {
            f"cache: {kind}": Work(one_token(Decoder(model, prompts, kind, None, None)), rows)
            for kind in get_args(CacheKind)[::-1]
        }
        title = f"one more token, {describe(cfg, rows)}"
        reports.append(compare("generate", title, works, device, precision_of(device)))
    return reports


def one_token(decoder: Decoder) -> Callable[[], None]:
    """Texts that are nearly as long as the context grow by a token at each call. (Where they
    outgrow it, all is computed anew; the median does not see that.)"""

    @torch.no_grad()
    def call() -> None:
        decoder.feed(decoder.next_logits().argmax(-1))
        decoder.read()

    return call


def memory(device: torch.device, *, compile: bool) -> list[Report]:
    """What a training step keeps: on a GPU the peak, on a CPU what the backward pass needs."""
    cfg, batch = large(device)
    batch = 12 if device.type == "cuda" else batch
    works = {}
    for name, block, recompute in (
        ("nrgpt", "nrgpt", False),
        ("nrgpt, steps recomputed", "nrgpt", True),
        ("gpt", "gpt", False),
        ("rgpt_parallel", "rgpt_parallel", False),
    ):
        model = LanguageModel(replace(cfg, block=block))  # type: ignore[arg-type]
        model.checkpoint_steps = recompute
        step = Step(model, batch, device, compile=compile)
        step()
        note = f"{kept_bytes(step, device) / 2**30:.2f} GiB"
        works[name] = step.work(note)
    title = f"memory of a training step, {describe(cfg, batch)}"
    return [compare("memory", title, works, device, precision_of(device))]


def kept_bytes(step: Step, device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in step.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step.loss()
    loss.backward()
    return sum(size for place, size in kept.items() if place not in weights)


SUITES = {
    "train": train,
    "small": small,
    "packed": packed,
    "generate": generate,
    "memory": memory,
}


def profile(device: torch.device, *, compile: bool, trace: Path) -> str:
    """A trace of a few training steps (for chrome://tracing), and their costliest operations."""
    cfg, batch = large(device)
    step = Step(LanguageModel(cfg), batch, device, compile=compile)
    for _ in range(3):
        step()
    with torch.profiler.profile() as found:
        for _ in range(3):
            step()
    found.export_chrome_trace(str(trace))
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return found.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=60)
