"""What is measured. Sizes are those of the paper's models on a GPU, and small ones on a CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..decode.decoder import CacheKind, Decoder, make_decoder
from ..language_model import LanguageModel
from ..model.config import ModelConfig
from ..model.flops import flops_per_token
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
        self.called: Any = torch.compile(self.model, dynamic=False) if compile else self.model
        settings = OptimiserConfig(name=optimiser)
        self.optimisers = make_optimisers(self.model, settings, device)
        text = torch.randint(cfg.vocab_size, (batch, cfg.context + 1), device=device)
        self.idx, self.targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        self.device = device

    def loss(self) -> Tensor:
        with autocast(self.device):
            _, loss = self.called(self.idx, self.targets, want_logits=False)
        return loss

    def __call__(self) -> Tensor:
        self.model.zero_grad()
        loss = self.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        return loss.detach()

    def work(self, note: str = "") -> Work:
        check_that_gradients_arrive(self)
        batch = len(self.idx)
        flops = flops_per_token(self.model.cfg, batch=batch)
        return Work(self, batch * self.model.cfg.context, flops, note)


def check_that_gradients_arrive(step: Callable[[], Tensor]) -> None:
    """A step on one and the same batch. What computes no gradient would be fast, and worthless; but
    for weight decay, which changes a loss by a millionth or so, it would stay where it is. (Whether
    the loss falls is another question: without warm-up a gpt's rises first.)"""
    losses = [step().mean() for _ in range(5)]
    change = (losses[-1] - losses[0]) / losses[0]
    if not change.abs() > 0.001:
        raise RuntimeError(
            f"{step.__class__.__name__}: after four updates on one batch its loss is "
            f"{losses[-1].item():.4f} and was {losses[0].item():.4f}; what is timed has no gradient"
        )


def describe(cfg: ModelConfig, batch: int) -> str:
    sizes = f"width {cfg.width}, {cfg.heads} heads, {cfg.steps} steps"
    return f"{sizes}, batch {batch} x {cfg.context}, vocabulary {cfg.vocab_size:,}"


def precision_of(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def autocast(device: torch.device) -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def large(device: torch.device) -> tuple[ModelConfig, int]:
    if device.type == "cuda":
        return ModelConfig(vocab_size=50_304), 32
    return ModelConfig(vocab_size=65, context=256, width=256, heads=8, steps=8), 4


def train(device: torch.device, *, compile: bool) -> list[Report]:
    """A training step against autograd inside, and against the baselines."""
    cfg, batch = large(device)
    is_cuda = device.type == "cuda"
    few = 4 if is_cuda else batch  # with autograd inside, scores of all pairs are kept
    works = {}
    rows = [
        ("autograd, textbook", textbook_model(cfg), few),
        ("autograd, our energies", autograd_model(cfg), few),
        ("nrgpt", LanguageModel(cfg), batch),
        ("nrgpt, full rank", LanguageModel(replace(cfg, coupling="full")), batch // 2),
        ("gpt", LanguageModel(replace(cfg, block="gpt")), batch),
        ("rgpt_parallel", LanguageModel(replace(cfg, block="rgpt_parallel")), batch),
    ]
    if is_cuda:  # where a larger batch still pays
        rows.append(("nrgpt, twice the batch", LanguageModel(cfg), 2 * batch))
    for name, model, size in rows:
        compiled = compile and "autograd" not in name
        note = f"batch {size}{', compiled' if compiled else ''}"
        works[name] = Step(model, size, device, compile=compiled).work(note)
    title = f"training step, {describe(cfg, batch)}"
    return [compare("train", title, works, device, precision_of(device))]


IN_A_ROW = 10


class RecordedStep:
    """A training step of one or many small models, recorded as a CUDA graph on a GPU."""

    def __init__(
        self,
        cfg: ModelConfig,
        batch: int,
        device: torch.device,
        *,
        runs: int = 1,
        compile: bool = False,
        optimiser: Literal["adamw", "muon"] = "adamw",
    ):
        models = [LanguageModel(cfg).to(device) for _ in range(runs)]
        settings = [OptimiserConfig(name=optimiser)] * runs
        self.cfg, self.batch, self.runs = cfg, batch, runs
        self.step = PackedStep(
            models, settings, precision=lambda: autocast(device), compile=compile, graph=True
        )
        text = torch.randint(cfg.vocab_size, (runs, batch, cfg.context + 1), device=device)
        self.idx, self.targets = text[..., :-1].contiguous(), text[..., 1:].contiguous()
        self.rates = torch.ones(runs, dtype=torch.float64, device=device)

    def __call__(self) -> Tensor:
        losses, _ = self.step(self.idx, self.targets, None, self.rates)
        return losses

    def work(self, times: int = 1) -> Work:
        """``times`` updates. On a GPU several such are timed in a row, since in training nobody
        waits for one before the next is sent."""
        check_that_gradients_arrive(self)
        parts = IN_A_ROW if self.idx.is_cuda else 1

        def call() -> None:
            for _ in range(times * parts):
                self()

        tokens = parts * times * self.runs * self.batch * self.cfg.context
        return Work(call, tokens, flops_per_token(self.cfg, batch=self.batch), parts=parts)


def small_sizes(device: torch.device) -> dict[str, tuple[ModelConfig, int]]:
    is_cuda = device.type == "cuda"
    return {
        "Shakespeare": (
            ModelConfig(vocab_size=65, context=256, width=128, heads=4, steps=8),
            64 if is_cuda else 4,
        ),
        "ListOps": (
            ModelConfig(vocab_size=17, context=128, width=64, heads=4, steps=5),
            64 if is_cuda else 4,
        ),
    }


def small(device: torch.device, *, compile: bool) -> list[Report]:
    """The sizes of Shakespeare and ListOps, where launches cost more than arithmetic."""
    reports = []
    for name, (cfg, batch) in small_sizes(device).items():
        works = {}
        for block in ("nrgpt", "gpt", "rgpt_parallel"):
            own = replace(cfg, block=block)
            works[block] = RecordedStep(own, batch, device, compile=compile).work()
        muon = RecordedStep(cfg, batch, device, compile=compile, optimiser="muon")
        works["nrgpt, Muon"] = muon.work()
        title = f"{name}, {describe(cfg, batch)}"
        reports.append(compare("small", title, works, device, precision_of(device)))
    return reports


def packed(device: torch.device, *, compile: bool) -> list[Report]:
    """Sixteen runs packed into one, against one and against sixteen one after the other."""
    cfg, batch = small_sizes(device)["ListOps"]
    lone = RecordedStep(cfg, batch, device, compile=compile)
    works = {
        "one": lone.work(),
        "16 packed": RecordedStep(cfg, batch, device, runs=16, compile=compile).work(),
        "16 one by one": lone.work(times=16),
    }
    title = f"packed training, {describe(cfg, batch)}"
    return [compare("packed", title, works, device, precision_of(device))]


def generate(device: torch.device, *, compile: bool) -> list[Report]:
    """New tokens after a long text: without a cache, with the frozen one, with the exact one."""
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
        works = {}
        for kind in get_args(CacheKind)[::-1]:
            # Some tokens at a time, as in use: on a GPU the next one is begun before one is read.
            tokens = 16 if is_cuda and kind != "none" else 1
            decoder = make_decoder(model, prompts, kind, None, None)
            call = more_tokens(decoder, tokens)
            works[f"cache: {kind}"] = Work(call, tokens * rows, parts=tokens)
        title = f"new tokens, {describe(cfg, rows)}"
        reports.append(compare("generate", title, works, device, precision_of(device)))
    return reports


def more_tokens(decoder: Decoder, tokens: int) -> Callable[[], None]:
    """Texts grow by ``tokens`` at each call. (Where they outgrow the context, all is computed anew;
    the median does not see that.)"""

    @torch.no_grad()
    def call() -> None:
        for number in range(tokens):
            decoder.feed(decoder.next_logits().argmax(-1))
            if number >= decoder.lead:
                decoder.read()
        for _ in range(min(tokens, decoder.lead)):
            decoder.read()

    return call


def memory(device: torch.device, *, compile: bool) -> list[Report]:
    """What a training step keeps: on a GPU the peak, on a CPU what the backward pass needs."""
    cfg, batch = large(device)
    batch = 12 if device.type == "cuda" else batch
    works = {}
    for name, own, recompute in (
        ("nrgpt", cfg, False),
        ("nrgpt, steps recomputed", cfg, True),
        ("gpt", replace(cfg, block="gpt"), False),
        ("rgpt_parallel", replace(cfg, block="rgpt_parallel"), False),
    ):
        others = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        model = LanguageModel(own)
        model.checkpoint_steps = recompute
        step = Step(model, batch, device, compile=compile)
        step()
        note = f"{(kept_bytes(step, device) - others) / 2**30:.2f} GiB"
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
    with torch.profiler.profile(acc_events=True) as found:  # else torch 2.11 warns
        for _ in range(3):
            step()
    found.export_chrome_trace(str(trace))
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return found.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=60)
