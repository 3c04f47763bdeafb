"""Train the neighbours on the same characters, and measure what each promises.

    python -m experiments.neighbours.run [--seeds 0,1] [--size small|large] [NAME ...]
    python -m experiments.neighbours.run --quick              # all of them in tiny, in a minute

Runs go to OUT/runs and are not trained again; a row for each to FOLDER/results.jsonl, their
records to FOLDER/records.jsonl, and tables of all rows to FOLDER/tables.md, where FOLDER is this
one (for --quick: OUT).
"""

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments import training
from nrgpt.data.shards import TokenStream
from nrgpt.dynamics.descent import check_descent
from nrgpt.language_model import LanguageModel
from nrgpt.measure.loss import masked_loss, split_loss
from nrgpt.model.flops import flops_per_token
from nrgpt.reproduce import records
from nrgpt.reproduce.tables import Column, Row, grouped, of_first, spread_of, table, write_text
from nrgpt.train.config import TrainConfig
from nrgpt.train.data import open_dataset
from nrgpt.train.loop import train
from nrgpt.train.runs import is_finished, load_run, read_result

from .models import JOBS, SIZES, config

HERE = Path(__file__).parent
FILES = ("config.json", "environment.json", "metrics.jsonl", "result.json", "samples.txt")


def measured(name: str, size: str, cfg: TrainConfig, folder: Path, *, quick: bool) -> Row:
    """What a finished run says of itself."""
    result, model = read_result(folder), load_run(folder).model
    certificate = model.certificate()
    return {
        "model": name,
        "size": size,
        "seed": cfg.seed,
        "objective": cfg.objective,
        "parameters": model.parameter_counts().total,
        "flops_training": flops_per_token(cfg.model),
        "flops_inference": flops_per_token(cfg.model, training=False),
        "tokens": cfg.iterations * cfg.batch * cfg.model.context,
        "loss": validation_loss(model, cfg, quick),
        "estimate": result["best_val_loss_estimate"],
        "certificate": certificate.level.name,
        **falls(model, cfg),
    }


def validation_loss(model: LanguageModel, cfg: TrainConfig, quick: bool) -> float:
    """Over the whole split, in disjoint windows: every token once (or those that are missing)."""
    stream = open_dataset(cfg.data, cfg.model.vocab_size).tokens("val")
    if quick:
        stream = TokenStream("val", [stream.read(0, 8 * cfg.model.context)])
    if cfg.masking is not None:
        return masked_loss(model, stream, cfg.masking).loss
    return split_loss(model, stream, stride=cfg.model.context).loss


@torch.no_grad()
def falls(model: LanguageModel, cfg: TrainConfig, texts: int = 16) -> dict[str, Any]:
    """Which share of steps raises the energy in the forward pass, on validation texts: that of each
    token, of the sequence, or of each candidate."""
    if cfg.model.block not in ("nrgpt", "et", "ebt"):
        return {}
    stream = open_dataset(cfg.data, cfg.model.vocab_size).tokens("val")
    idx, _ = stream.batch(seed=0, step=0, size=texts, context=cfg.model.context)
    if cfg.masking is not None:
        idx, _ = cfg.masking(idx, seed=0, step=0)
    model = model.double().eval()
    if cfg.model.block != "ebt":
        found = check_descent(model, idx)
        rows = {"rises": found.parallel.share, "largest_rise": found.parallel.relative}
        if cfg.model.block == "nrgpt":
            rows |= {"rises_within": found.within.share, "rises_of_sum": rises_of_sum(model, idx)}
        return rows
    plan = model.plan().blocks[0]
    x, seen = plan.begin(model.embed(idx))
    energies = []
    for t in range(model.cfg.steps + 1):
        energies.append(plan.energy(x, seen))  # type: ignore[attr-defined]
        x = plan.move(x, t, seen)
    change = torch.stack(energies).diff(dim=0)
    return {"rises": (change > 0).double().mean().item()}


def rises_of_sum(model: LanguageModel, idx: torch.Tensor) -> float:
    """The share of steps that raise the sum of all tokens' energies, the energy of an et."""
    states = model.states(idx, dropout=False)
    sums = torch.stack([torch.stack(list(model.energies(x).values())).sum((0, -1)) for x in states])
    return (sums.diff(dim=0) > 0).double().mean().item()


def rises(own: list[Row]) -> str:
    """Which energies rise, and how often."""
    if "rises" not in own[0]:
        return "-"
    share = spread_of("rises", 3)(own)
    return (
        f"{share} (sum {spread_of('rises_of_sum', 3)(own)})" if "rises_of_sum" in own[0] else share
    )


COLUMNS: dict[str, Column] = {
    "model": of_first("{model}"),
    "seeds": len,
    "parameters": of_first("{parameters:,}"),
    "FLOPs a token, inference": of_first("{flops_inference:,.0f}"),
    "training": of_first("{flops_training:,.0f}"),
    "CPU seconds": spread_of("cpu_seconds", 0),
    "loss": spread_of("loss", 3),
    "proved": of_first("{certificate}"),
    "steps that raise an energy": rises,
}


def tables(rows: list[Row]) -> str:
    """One for each size and task."""
    text = "# Neighbours\n\nLosses in nats, mean ± standard deviation over seeds.\n"
    for (size, objective), own in grouped(rows, "size", "objective").items():
        tokens = f"{own[0]['tokens']:,}"
        text += f"\n## {size}, {objective}, {tokens} tokens\n\n"
        text += table(COLUMNS, grouped(own, "model").values())
    return text


def main(
    names: Annotated[list[str] | None, typer.Argument(help="models; all without any")] = None,
    seeds: Annotated[str, typer.Option(help="separated by commas")] = "0,1",
    size: Annotated[str, typer.Option(help="small (a CPU core) or large (a GPU)")] = "small",
    out: Annotated[Path, typer.Option(help="where runs go")] = Path("out/neighbours"),
    quick: Annotated[bool, typer.Option(help="all in tiny: does everything run?")] = False,
) -> None:
    """Train the neighbours on the same characters, and measure what each promises."""
    training.check_names([size], SIZES)
    names = names or list(JOBS)
    training.check_names(names, JOBS)
    folder = out if quick else HERE
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.jsonl"
    for seed in map(int, seeds.split(",")):
        for name in names:
            cfg = config(name, size=size, seed=seed, quick=quick)
            run = out / "runs" / f"{name}-{size}-s{seed}"
            if is_finished(cfg, run):
                continue
            began = time.process_time()
            train(cfg, run)
            seconds = time.process_time() - began  # of all threads, whatever else is running
            row = measured(name, size, cfg, run, quick=quick)
            training.add_row(results, row | {"cpu_seconds": round(seconds, 1)})
            records.put(folder, {run.name: records.Record.of(run, FILES)})
    write_text(folder / "tables.md", tables(training.read_rows(results)))


if __name__ == "__main__":
    typer.run(main)
