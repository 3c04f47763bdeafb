"""Tables and a figure of models that experiments.settled.run trained and measured.

    python -m experiments.settled.tables FOLDER

FOLDER has text.jsonl, the lines that the runs wrote, and records.jsonl; FOLDER/tables.md and
FOLDER/losses.png are made of them. A run is named MODEL-sSEED.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from experiments.training import read_rows

from nrgpt.check import from_dict
from nrgpt.dynamics.figures import save
from nrgpt.model.flops import flops_per_token
from nrgpt.reproduce import records
from nrgpt.reproduce.common import usual_speed, with_seconds
from nrgpt.reproduce.curves import curves
from nrgpt.reproduce.tables import (
    Column,
    Row,
    grouped,
    markdown,
    of_first,
    spread,
    table,
    write_text,
)
from nrgpt.train.config import TrainConfig

ROWS = "text.jsonl"
CHANCE = {
    "blimp": 0.5, "lambada": 0.0, "arc_easy": 0.25, "arc_challenge": 0.25, "piqa": 0.5,
    "winogrande": 0.5, "winograd": 0.5, "openbookqa": 0.25,
}  # fmt: skip
EMBEDDINGS = ("tokens", "positions", "head")


def rows_of(folder: Path) -> tuple[list[Row], dict[str, list[Row]]]:
    """A row for each run that was measured, of its lines and of what its record says; and the
    lines of its metrics, with seconds."""
    measured: dict[str, Row] = {}
    for line in read_rows(folder / ROWS):
        measured.setdefault(line["name"], {}).update(line)
    rows, metrics = [], {}
    for name, record in records.read(folder).items():
        found = measured.get(name, {})
        if "disjoint_windows" not in found:
            continue
        cfg = from_dict(TrainConfig, record.read("config.json"))
        metrics[name] = entries = with_seconds(record.read("metrics.jsonl"), cfg)
        groups = found["result"]["parameters"]["groups"]
        tokens = cfg.iterations * cfg.batch * cfg.model.context
        model, _, seed = name.rpartition("-s")
        derived: Row = {
            "case": name,
            "model": model,
            "seed": int(seed),
            "width": cfg.model.width,
            "steps": cfg.model.steps,
            "iterations": cfg.iterations,
            "tokens": tokens,
            "training_flops": tokens * flops_per_token(cfg.model, batch=cfg.batch),
            "inner_parameters": sum(n for key, n in groups.items() if key not in EMBEDDINGS),
            "val_loss_full": found["disjoint_windows"]["loss"],
            "tokens_per_second": usual_speed(entries),
            "seconds": entries[-1]["seconds"],
        }
        rows.append(found | derived)
    return rows, metrics


def after_more_steps(times: int) -> Column:
    """What more steps than trained cost, on the texts of which that was measured."""

    def column(own: list[Row]) -> str:
        found = []
        for row in own:
            losses = row.get("losses_by_steps", {})
            if str(times * row["steps"]) in losses:
                found.append(losses[str(times * row["steps"])] - losses[str(row["steps"])])
        return f"{sum(found) / len(found):+.3f}" if found else "-"

    return column


def rises(own: list[Row]) -> str:
    """In the forward pass, in float32."""
    found = [row["rises"] for row in own if "rises" in row]
    total = sum(entry["pairs"] for entry in found)
    return f"{sum(entry['rises'] for entry in found):,} of {total:,}" if found else "-"


def optional(name: str, digits: int = 3) -> Column:
    def column(own: list[Row]) -> str:
        values = [row[name] for row in own if name in row]
        return spread(values, digits) if values else "-"

    return column


COLUMNS: dict[str, Column] = {
    "model": of_first("{model}"),
    "parameters": of_first("{parameters:,}"),
    "without embeddings": of_first("{inner_parameters:,}"),
    "tokens": of_first("{tokens:,}"),
    "FLOPs of training": of_first("{training_flops:.3g}"),
    "tokens/s": lambda own: f"{max(row['tokens_per_second'] for row in own):,.0f}",
    "seeds": len,
    "loss": lambda own: spread([row["val_loss_full"] for row in own], 3),
    "held out": optional("held_out"),
    "twice the steps": after_more_steps(2),
    "four times": after_more_steps(4),
    "rises": rises,
}


def benchmark_table(rows: Sequence[Row]) -> str:
    """Percentages with the standard error over questions, of the mean over seeds."""
    asked = {name for row in rows for name in row.get("benchmarks", {}) if name in CHANCE}
    names = [name for name in CHANCE if name in asked]
    if not names:
        return ""
    lines: list[list[Any]] = [["chance", *(f"{100 * CHANCE[name]:.0f}" for name in names)]]
    for (model,), own in grouped(rows, "model").items():
        found = [row["benchmarks"] for row in own if "benchmarks" in row]
        if not found:
            continue
        cells = []
        for name in names:
            share = sum(entry[name]["acc"] for entry in found) / len(found)
            number = min(entry[name]["questions"] for entry in found)
            error = (share * (1 - share) / max(1, number - 1)) ** 0.5
            cells.append(f"{100 * share:.1f} ± {100 * error:.1f}")
        lines.append([model, *cells])
    return "\n## Benchmarks\n\n" + markdown(["model", *names], lines)


def main(
    folder: Annotated[Path, typer.Argument(help=f"with {ROWS} and records.jsonl")],
) -> None:
    """Tables and a figure of trained and measured models."""
    rows, metrics = rows_of(folder)
    said = f"# {folder.name}\n\nLosses in nats, mean ± standard deviation over seeds.\n\n"
    said += table(COLUMNS, grouped(rows, "model").values()) + benchmark_table(rows)
    write_text(folder / "tables.md", said)
    models = list(dict.fromkeys(row["model"] for row in rows))
    colours = {model: f"C{number}" for number, model in enumerate(models)}
    save(curves(rows, metrics, colours), folder / "losses", ("png",))


if __name__ == "__main__":
    typer.run(main)
