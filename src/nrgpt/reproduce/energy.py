"""The paper's two figures of energies: 30 steps with eta = 1, and 100 steps with a free eta.

Each shows 64 tokens of the validation split. ||x|| is drawn beside the energies, because g slows
down where x grows, whether or not anything has converged.
"""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..dynamics.convergence import settling_order
from ..dynamics.descent import check_descent
from ..dynamics.figures import energy_figure, save
from ..dynamics.trajectory import Trajectory, trajectory
from ..train.distributed import device_named
from ..train.overrides import replace
from ..train.presets import PRESETS
from ..train.runs import load_run
from .common import Case, carry_out, suffix_of
from .records import Record, read
from .tables import Column, Row, failures, grouped, of_first, table, write_text

TOKENS = 64
FILE = "trajectory.npz"
BESIDE = ("size", "move", "loss", "idx")
"""Arrays of a trajectory that are kept beside the energies."""

OURS: dict[str, Any] = {
    "data.listops.numbers": 10, "data.listops.modulus": 10, "model.vocab_size": 17,
    "model.context": 64, "model.coupling": "low_rank", "model.heads": 4,
    "model.feedforward": "ff2w", "precision": "bf16", "checkpoint_steps": False,
}  # fmt: skip
"""The task and the energy of our ListOps recipe."""
OURS_BY_STEPS: dict[int, dict[str, Any]] = {
    30: {"iterations": 10_000, "optimiser.lr": 1e-3, "optimiser.muon_lr": 0.005},
    100: {
        "iterations": 8_000, "optimiser.lr": 1e-3, "optimiser.muon_lr": 0.002,
        "model.rate_scale": 0.05,
    },
}  # fmt: skip
"""Deeper models need smaller learning rates, because x grows with the number of steps and with the
weights. At the recipe's own rates a model of 30 steps learns nothing until they have decayed to a
third (experiments/energy)."""

QUICK: dict[str, Any] = {
    "iterations": 40, "optimiser.warmup": 5, "batch": 8, "model.width": 16, "model.context": 64,
    "log_every": 20, "eval_every": 20, "eval_batches": 1, "save_every": 20,
    "data.listops.train": 5_000, "data.listops.validation": 200, "data.listops.test": 20,
    "precision": "fp32",
}  # fmt: skip


def cases(recipe: str = "ours", seeds: int = 1, quick: bool = False) -> list[Case]:
    suffix_of(recipe)
    found = []
    for steps in (30, 100):
        cfg = PRESETS[f"energy_{steps}_steps_paper"]()
        if recipe == "ours":
            usual = PRESETS["listops_nrgpt_ff2w"]()
            cfg = replace(cfg, {"optimiser": usual.optimiser, "iterations": usual.iterations})
            cfg = replace(cfg, {**OURS, **OURS_BY_STEPS[steps]})
        cfg = replace(cfg, QUICK if quick else {})
        labels = {"recipe": recipe, "rate": cfg.model.rate}
        found += Case(f"{recipe}-{steps}-steps", cfg, labels).with_seeds(seeds)
    cfg = replace(PRESETS["energy_30_steps_certified"](), QUICK if quick else {})
    labels = {"recipe": "certified", "rate": cfg.model.rate}
    return found + Case("certified-30-steps", cfg, labels).with_seeds(seeds)


def measure(case: Case, run: Path, record: Record) -> Row:
    """Follow the tokens in double precision, since late steps change little, and keep what the
    figure needs."""
    loaded = load_run(run, case.cfg.iterations, device=device_named("auto"))
    length = min(TOKENS, case.cfg.model.context)
    tokens = torch.from_numpy(loaded.first_tokens("val", length + 1).read(0, length + 1))
    text = tokens.to(loaded.model.tokens.device)[None]
    model = loaded.model.double()
    seen = trajectory(model, text[:, :-1], text[:, 1:])
    buffer, arrays = io.BytesIO(), seen.arrays()
    kept = {n: a for n, a in arrays.items() if n.startswith("energy_") or n in BESIDE}
    np.savez_compressed(buffer, **kept)  # type: ignore[arg-type]  # allow_pickle is no array
    record.files[FILE] = buffer.getvalue()
    total = seen.energies["total"][:, 0]
    changes = total.diff(dim=0)
    late = changes[len(changes) // 2 :]
    return {
        "watched_tokens": length,
        "lower_at_the_end": (total[-1] < total[0]).double().mean().item(),
        "rising_steps": (changes > 0).double().mean().item(),
        "rising_late_steps": (late > 0).double().mean().item(),
        "first_token_rises": (changes[:, 0] > 0).sum().item(),
        "rising_with_frozen_past": check_descent(model, text[:, :-1]).frozen.share,
        "last_change": (changes[-1].abs().mean() / (total[-1] - total[0]).abs().mean()).item(),
        "size_first": seen.size[0].mean().item(),
        "size_last": seen.size[-1].mean().item(),
    }


def reproduce(cases: Sequence[Case], to: Path, **options: Any) -> list[Path]:
    rows = carry_out(cases, to, measure, **options)
    files, orders, records = [], {}, read(to)
    for (name,) in grouped(rows, "case"):
        seen = watched(records[name])
        orders[name] = settling_order(seen.energies["total"])
        files += save(energy_figure(seen), to / name, ("png",))
    return [*files, write_text(to / "energies.md", energy_table(rows, orders))]


def watched(record: Record) -> Trajectory:
    """The trajectory that ``measure`` kept, for the figure."""
    with np.load(io.BytesIO(record.files[FILE])) as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Trajectory))
    fields |= {name: tensors.pop(name) for name in BESIDE}
    terms = {name.removeprefix("energy_"): energy for name, energy in tensors.items()}
    terms["total"] = terms.pop("total")  # drawn last
    return Trajectory(**fields | {"energies": terms, "trained_steps": len(fields["size"]) - 1})


def energy_table(rows: Sequence[Row], orders: Mapping[str, float]) -> str:
    columns: dict[str, Column] = {
        "run": of_first("{case}"),
        "eta": of_first("{rate}"),
        "iterations": of_first("{iterations:,}"),
        "accuracy (95 % interval)": of_first(
            "{accuracy:.1%} ({interval[0]:.1%} - {interval[1]:.1%})"
        ),
        "tokens that end lower": of_first("{lower_at_the_end:.0%} of {watched_tokens}"),
        "steps that raise an energy": of_first("{rising_steps:.1%}"),
        "the same, second half": of_first("{rising_late_steps:.1%}"),
        "last step's share": of_first("{last_change:.2%}"),
        "settling order": lambda own: f"{orders[own[0]['case']]:.2f}",
        "mean ‖x‖": of_first("{size_first:.1f} → {size_last:.1f}"),
    }
    said = (
        "# Energies over the steps\n\nThe first tokens of the validation split, over the steps "
        "that the models were trained with. The last step's share is its mean change of a token's "
        "energy, compared with the change over all steps: what has settled has a small one. "
        "A growing ‖x‖ makes it small, too. The settling order is the rank correlation of a "
        "token's position with the step from which its energy stays within 5 % of its range from "
        "its end (1: one after the other; for 64 tokens, chance gives more than 0.25 in one case "
        "of forty).\n\n"
    )
    return said + table(columns, grouped(rows, "case").values()) + failures(rows)
