"""Variants of the paper's model that it names and does not compare, on ListOps and Shakespeare: one
change at a time from FF2W, with our recipe. Are they as good, and do their energies fall?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..dynamics.descent import check_descent
from ..train.distributed import device_named
from ..train.overrides import replace
from ..train.presets import PRESETS
from ..train.runs import load_run
from .common import Case, carry_out, suffix_of, usual_speed
from .records import Record
from .tables import Column, Row, failures, grouped, of_first, spread, spread_of, table, write_text

MEMORY = {"model.feedforward": "memory", "model.hidden_factor": 8}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ff2w": ("FF2W", {}),
    "ff1": ("FF1, hidden 8D", {"model.feedforward": "ff1", "model.hidden_factor": 8}),
    "ff2": ("FF2", {"model.feedforward": "ff2"}),
    **{
        f"memory-{potential}": (f"memory, {potential}", MEMORY | {"model.potential": potential})
        for potential in ("relu2", "gelu", "softplus", "softplus2")
    },
    "rmsnorm": ("RMSNorm", {"model.norm": "rmsnorm"}),
    "no-norm": ("no norm, smaller starts", {"model.norm": "none"}),
    "no-norm-psd": (
        "no norm, eta = U^T U + V - V^T (Proposition 2)",
        {"model.norm": "none", "model.rate": "psd_skew"},
    ),
    "state": ("eta = M(x) P Gamma", {"model.rate": "state"}),
    "sphere": ("starts on the sphere", {"model.start": "sphere"}),
    "prelude": ("starts after an ordinary layer", {"model.prelude": 1}),
    "shared": (
        "safeguarded, starts after a free first step",
        {
            "model.prelude": 1, "model.prelude_block": "shared", "model.safeguard": "cone",
            **MEMORY,
        },
    ),
}  # fmt: skip
"""Title, and what differs from our recipe of FF2W (hidden 8D: as many parameters with one matrix as
4D with two)."""

TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "listops": ("listops_nrgpt_ff2w", {"model.width": 32}),
    "shakespeare": ("shakespeare_nrgpt_ff2w", {"iterations": 4_000}),
}
QUICK: dict[str, Any] = {
    "iterations": 20, "optimiser.warmup": 5, "batch": 8, "model.width": 16, "model.context": 32,
    "log_every": 10, "eval_every": 20, "eval_batches": 1, "save_every": 20, "precision": "fp32",
}  # fmt: skip
QUICK_LISTOPS = {
    "data.listops.train": 5_000, "data.listops.validation": 200, "data.listops.test": 20,
}  # fmt: skip
TEXTS = 8
"""Texts of the validation split whose energies are watched."""


def cases(recipe: str = "ours", seeds: int = 3, quick: bool = False) -> list[Case]:
    if suffix_of(recipe):
        raise ValueError("recipe = 'paper': the paper trains none of these; leave it out")
    found = []
    for task, (preset, sizes) in TASKS.items():
        for name, (_, changes) in VARIANTS.items():
            cfg = replace(PRESETS[preset](), {**sizes, **changes})
            if quick:
                cfg = replace(cfg, QUICK | (QUICK_LISTOPS if task == "listops" else {}))
            labels = {"task": task, "variant": name}
            found += Case(f"{task}-{name}", cfg, labels).with_seeds(seeds)
    return found


def measure(case: Case, run: Path, record: Record) -> Row:
    """How many steps raise an energy: of the tokens as they move, and among the keys as they were
    before each step, of which the certificate speaks."""
    loaded = load_run(run, case.cfg.iterations, device=device_named("auto"))
    length = case.cfg.model.context
    tokens = torch.from_numpy(loaded.first_tokens("val", TEXTS * length).read(0, TEXTS * length))
    seen = check_descent(loaded.model, tokens.view(TEXTS, -1).to(loaded.model.tokens.device))
    return {
        "rises": seen.parallel.share,
        "rises_within": seen.within.share,
        "certificate": bool(loaded.model.certificate()),
        "tokens_per_second": usual_speed(record.read("metrics.jsonl")),
    }


def reproduce(cases: Sequence[Case], to: Path, **options: Any) -> list[Path]:
    rows = carry_out(cases, to, measure, **options)
    order = list(VARIANTS).index
    rows = sorted(rows, key=lambda row: (row["task"], order(row["variant"])))
    return [write_text(to / "variants.md", variant_table(rows))]


def variant_table(rows: Sequence[Row]) -> str:
    columns: dict[str, Column] = {
        "task": of_first("{task}"),
        "variant": lambda own: VARIANTS[own[0]["variant"]][0],
        "parameters": of_first("{parameters:,}"),
        "seeds": len,
        "validation, whole split": spread_of("val_loss_full"),
        "accuracy": lambda own: spread_of("accuracy", 3)(own) if "accuracy" in own[0] else "-",
        "steps that raise an energy": spread_of("rises", 3),
        "the same, keys as before the step": spread_of("rises_within", 3),
        "proved": lambda own: "yes" if all(row["certificate"] for row in own) else "no",
        "tokens/s": lambda own: spread([row["tokens_per_second"] for row in own], 0),
    }
    said = (
        "# Variants\n\nOne change at a time from FF2W, our recipe; losses in nats, mean ± standard "
        "deviation over seeds. Proved: while the past stands still within a step "
        "(docs/equations.md); what happens while all tokens move is in the column of steps that "
        "raise an energy. Speeds are of runs that were trained together, as a pack.\n\n"
    )
    return said + table(columns, grouped(rows, "task", "variant").values()) + failures(rows)
