"""What the cone and a settled past cost, beside a GPT and RGPT-parallel of the same width."""

from dataclasses import replace
from typing import Any

import torch

from ..decode.decoder import make_decoder
from ..language_model import LanguageModel
from ..model.config import ModelConfig
from ..train.presets import SETTLED
from .measure import Report, Work, compare
from .suites import Step, describe, large, more_tokens

PLAIN: dict[str, Any] = {**SETTLED, "drive": False, "prelude": 2}
"""Two layers of prelude, and nothing that the theorem does not need."""
TIED: dict[str, Any] = {"feedforward": "memory", "norm": "rmsnorm"}


def settled(device: torch.device, *, compile: bool) -> list[Report]:
    """Training and generation of settled models; with and without the cone."""
    return [training(device, compile=compile), *generation(device)]


def training(device: torch.device, *, compile: bool) -> Report:
    cfg, batch = large(device)
    batch = batch // 2 if device.type == "cuda" else batch
    own = replace(cfg, **PLAIN)
    tied = replace(cfg, **TIED)
    rows = {
        "gpt": replace(cfg, block="gpt"),
        "rgpt_parallel": replace(cfg, block="rgpt_parallel"),
        "settled": own,
        "settled, no cone": replace(own, safeguard="none"),
        "the paper's past, tied": tied,
        "the same with the cone": replace(tied, safeguard="cone"),
    }
    works = {
        name: Step(LanguageModel(row), batch, device, compile=compile).work(note_of(row))
        for name, row in rows.items()
    }
    return compare("settled", f"training step, {describe(cfg, batch)}", works, device)


def note_of(cfg: ModelConfig) -> str:
    return f"prelude {cfg.prelude}" if cfg.past == "settled" and cfg.block == "nrgpt" else ""


def generation(device: torch.device) -> list[Report]:
    """New tokens after a long text. On a CPU, of small models with as many parameters."""
    is_cuda = device.type == "cuda"
    small = ModelConfig(vocab_size=65, context=256, width=80, heads=4, steps=8)
    cfg = large(device)[0] if is_cuda else small
    rows_of = {
        "gpt": replace(cfg, block="gpt") if is_cuda else replace(cfg, block="gpt", steps=3),
        "rgpt_parallel": replace(cfg, block="rgpt_parallel"),
        "settled": replace(cfg, **{**PLAIN, "prelude": 2 if is_cuda else 1}),
    }
    reports = []
    for rows in (1, 64) if is_cuda else (1, 8):
        prompts = torch.randint(cfg.vocab_size, (rows, cfg.context - 128)).tolist()
        works = {}
        for name, own in rows_of.items():
            model = LanguageModel(own).to(device, torch.bfloat16 if is_cuda else None).eval()
            tokens = 16 if is_cuda else 1
            call = more_tokens(make_decoder(model, prompts, "exact", None, None), tokens)
            count = model.parameter_counts().total
            works[name] = Work(call, tokens * rows, note=f"{count:,} parameters", parts=tokens)
        reports.append(compare("settled", f"new tokens, {describe(cfg, rows)}", works, device))
    return reports
