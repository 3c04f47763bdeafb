"""What is measured: models of the paper's sizes on a GPU, small ones on a CPU."""

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


def random_text(cfg: ModelConfig, *rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    text = torch.randint(cfg.vocab_size, (*rows, cfg.context + 1), device=device)
    return text[..., :-1].contiguous(), text[..., 1:].contiguous()


class Step:
    """A training update as in `nrgpt train`: both passes, clipping, optimiser."""

    def __init__(
        self, model: LanguageModel, batch: int, device: torch.device, *, compile: bool = False
    ):
        self.model = model.to(device)
        self.called: Any = torch.compile(self.model, dynamic=False) if compile else self.model
        self.optimisers = make_optimisers(self.model, OptimiserConfig(), device)
        self.idx, self.targets = random_text(model.cfg, batch, device=device)

    def loss(self) -> Tensor:
        with autocast(self.idx.device):
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
        flops = flops_per_token(self.model.cfg, batch=len(self.idx))
        return Work(self, self.idx.numel(), flops, note)


def check_that_gradients_arrive(step: Callable[[], Tensor]) -> None:
    """Updates on one batch must change its loss: without gradients a step would be fast but
    worthless, and weight decay alone changes the loss only by about a millionth. The loss need not
    fall: without warm-up that of a gpt rises first."""
    losses = [step().mean() for _ in range(5)]
    change = (losses[-1] - losses[0]) / losses[0]
    if not change.abs() > 0.001:
        raise RuntimeError(
            f"{step.__class__.__name__}: four updates on one batch changed its loss from "
            f"{losses[0].item():.4f} to {losses[-1].item():.4f}; what is timed has no gradient"
        )


def describe(cfg: ModelConfig, batch: int) -> str:
    sizes = f"width {cfg.width}, {cfg.heads} heads, {cfg.steps} steps"
    return f"{sizes}, batch {batch} x {cfg.context}, vocabulary {cfg.vocab_size:,}"


def autocast(device: torch.device) -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def large(device: torch.device) -> tuple[ModelConfig, int]:
    if device.type == "cuda":
        return ModelConfig(vocab_size=50_304), 32
    return ModelConfig(vocab_size=65, context=256, width=256, heads=8, steps=8), 4


def train(device: torch.device, *, compile: bool) -> list[Report]:
    """A training update, against autograd inside the forward pass and against the baselines."""
    cfg, batch = large(device)
    is_cuda = device.type == "cuda"
    few = 4 if is_cuda else batch  # autograd inside keeps the scores of all pairs
    works = {}
    rows = [
        ("autograd, textbook", textbook_model(cfg), few),
        ("autograd, our energies", autograd_model(cfg), few),
        ("nrgpt", LanguageModel(cfg), batch),
        ("nrgpt, full rank", LanguageModel(replace(cfg, coupling="full")), batch // 2),
        ("gpt", LanguageModel(replace(cfg, block="gpt")), batch),
        ("rgpt_parallel", LanguageModel(replace(cfg, block="rgpt_parallel")), batch),
    ]
    if is_cuda:
        rows.append(("nrgpt, twice the batch", LanguageModel(cfg), 2 * batch))
    for name, model, size in rows:
        compiled = compile and "autograd" not in name
        note = f"batch {size}{', compiled' if compiled else ''}"
        works[name] = Step(model, size, device, compile=compiled).work(note)
    return [compare("train", f"training step, {describe(cfg, batch)}", works, device)]


class RecordedStep:
    """A training update of one or many small models, recorded as a CUDA graph on a GPU."""

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
        self.step = PackedStep(
            models, settings, precision=lambda: autocast(device), compile=compile, graph=True
        )
        self.flops = flops_per_token(cfg, batch=batch)
        self.idx, self.targets = random_text(cfg, runs, batch, device=device)
        self.rates = torch.ones(runs, dtype=torch.float64, device=device)

    def __call__(self) -> Tensor:
        losses, _ = self.step(self.idx, self.targets, None, None, self.rates)
        return losses

    def work(self, times: int = 1) -> Work:
        """``times`` updates. On a GPU several are timed in a row: training does not wait for one
        before it launches the next."""
        check_that_gradients_arrive(self)
        parts = 10 if self.idx.is_cuda else 1

        def call() -> None:
            for _ in range(times * parts):
                self()

        return Work(call, parts * times * self.idx.numel(), self.flops, parts=parts)


def small_sizes(device: torch.device) -> tuple[dict[str, ModelConfig], int]:
    """Configurations, and the batch."""
    sizes = {
        "Shakespeare": ModelConfig(vocab_size=65, context=256, width=128, heads=4, steps=8),
        "ListOps": ModelConfig(vocab_size=17, context=128, width=64, heads=4, steps=5),
    }
    return sizes, 64 if device.type == "cuda" else 4


def small(device: torch.device, *, compile: bool) -> list[Report]:
    """The sizes of Shakespeare and ListOps, where launches cost more than arithmetic."""
    reports = []
    sizes, batch = small_sizes(device)
    for name, cfg in sizes.items():
        works = {}
        for block in ("nrgpt", "gpt", "rgpt_parallel"):
            own = replace(cfg, block=block)
            works[block] = RecordedStep(own, batch, device, compile=compile).work()
        muon = RecordedStep(cfg, batch, device, compile=compile, optimiser="muon")
        works["nrgpt, Muon"] = muon.work()
        reports.append(compare("small", f"{name}, {describe(cfg, batch)}", works, device))
    return reports


def packed(device: torch.device, *, compile: bool) -> list[Report]:
    """Sixteen runs packed together, against one, and against sixteen one after the other."""
    sizes, batch = small_sizes(device)
    cfg = sizes["ListOps"]
    lone = RecordedStep(cfg, batch, device, compile=compile)
    works = {
        "one": lone.work(),
        "16 packed": RecordedStep(cfg, batch, device, runs=16, compile=compile).work(),
        "16 one by one": lone.work(times=16),
    }
    return [compare("packed", f"packed training, {describe(cfg, batch)}", works, device)]


def generate(device: torch.device, *, compile: bool) -> list[Report]:
    """New tokens after a long text, with each kind of cache."""
    is_cuda = device.type == "cuda"
    cfg = large(device)[0] if is_cuda else replace(large(device)[0], context=512)
    model = LanguageModel(cfg).to(device, torch.bfloat16 if is_cuda else None).eval()
    reports = []
    for rows in (1, 64) if is_cuda else (1, 8):
        prompts = torch.randint(cfg.vocab_size, (rows, cfg.context - 128)).tolist()
        works = {}
        for kind in get_args(CacheKind)[::-1]:
            # Several tokens per call: in use, a GPU starts on the next before one is read.
            tokens = 16 if is_cuda and kind != "none" else 1
            call = more_tokens(make_decoder(model, prompts, kind, None, None), tokens)
            works[f"cache: {kind}"] = Work(call, tokens * rows, parts=tokens)
        title = f"new tokens, {describe(cfg, rows)}"
        reports.append(compare("generate", title, works, device))
    return reports


def more_tokens(decoder: Decoder, tokens: int) -> Callable[[], None]:
    """Each call adds ``tokens`` to the texts. When they outgrow the context, everything is computed
    again; this does not affect the median."""

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
    """Memory of a training update: on a GPU its peak, on a CPU what the backward pass needs."""
    cfg, batch = large(device)
    batch = 12 if device.type == "cuda" else batch
    works = {}
    configs = {name: replace(cfg, block=name) for name in ("nrgpt", "gpt", "rgpt_parallel")}
    for name, own in {**configs, "nrgpt, steps recomputed": cfg}.items():
        others = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        model = LanguageModel(own)
        model.checkpoint_steps = "recomputed" in name
        step = Step(model, batch, device, compile=compile)
        step()
        works[name] = step.work(f"{(kept_bytes(step) - others) / 2**30:.2f} GiB")
    title = f"memory of a training step, {describe(cfg, batch)}"
    return [compare("memory", title, works, device)]


def kept_bytes(step: Step) -> int:
    if step.idx.is_cuda:
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


def profile(device: torch.device, *, compile: bool, trace: Path) -> str:
    """Write a trace of three training updates, for chrome://tracing; return their costliest
    operations."""
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
