"""How long a training will take on a CPU, by a small measurement."""

import dataclasses
import time

import torch

from ..language_model import LanguageModel
from ..model.flops import flops_per_token
from .config import OptimiserConfig, TrainConfig
from .optim import make_optimisers

TOKENS = 512
"""Tokens of the batch that is timed: a few texts, or a part of one."""
MOST_WEIGHTS = 20_000_000
"""Larger models are not made just to be timed; their time follows from a smaller one's."""


def estimated_seconds(cfg: TrainConfig) -> float:
    """Of all updates, without evaluations: an update of few tokens is timed, and scaled."""
    model = cfg.model
    while model.width * (model.vocab_size + 12 * model.width * model.steps) > MOST_WEIGHTS:
        smaller = {"width": model.heads * max(8, model.width // (2 * model.heads))}
        if smaller["width"] >= model.width:
            break
        smaller["vocab_size"] = max(64, model.vocab_size // 2)
        model = dataclasses.replace(model, **smaller)  # type: ignore[arg-type]
    length = min(model.context, TOKENS)
    rows = max(1, min(cfg.batch, TOKENS // length))
    per_token = update_seconds(LanguageModel(model), rows, length) / (rows * length)
    scale = flops_per_token(cfg.model) / flops_per_token(model)
    return per_token * scale * cfg.batch * cfg.model.context * cfg.iterations


def update_seconds(model: LanguageModel, rows: int, length: int) -> float:
    optimisers = make_optimisers(model, OptimiserConfig(), torch.device("cpu"))
    idx = torch.randint(model.cfg.vocab_size, (rows, length))
    times = []
    with torch.random.fork_rng():
        for _ in range(3):
            begun = time.perf_counter()
            _, loss = model(idx, idx, want_logits=False)
            loss.backward()
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()
            times.append(time.perf_counter() - begun)
    return min(times)


def duration(seconds: float) -> str:
    """Rounded, in the unit that suits it."""
    for name, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(1, round(seconds))} seconds"
