"""The models of the paper's OpenWebText tables, on the same tokens of any prepared text; and what
the paper's own run would cost."""

import dataclasses
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..data.shards import Dataset
from ..dynamics.figures import save
from ..evaluate.mmlu import ask, introduction, subjects_of
from ..evaluate.samples import first_words
from ..measure.loss import SplitLoss, bits_of_text, split_loss
from ..train.distributed import device_named
from ..train.metrics import read_metrics
from ..train.overrides import replace
from ..train.presets import PRESETS
from ..train.runs import load_run
from ..train.speed import autocast
from . import tables, texts
from .common import Case, Measure, carry_out, put_rows, run_folder, suffix_of, usual_speed
from .curves import curves
from .mmlu import all_questions, mmlu_table
from .records import Record, put, read
from .tables import Column, Row, grouped, markdown, of_first, spread, write_text
from .training import screen

ROWS = {
    "GPT": "owt_gpt",
    "RGPT-parallel": "owt_rgpt_parallel",
    "NRGPT FF1": "owt_nrgpt_ff1",
    "NRGPT FF2W": "owt_nrgpt_ff2w",
    "RGPT-parallel, as many parameters": "owt_rgpt_parallel_equal_parameters",
    "NRGPT FF2W, as many parameters": "owt_nrgpt_ff2w_equal_parameters",
}
"""The rows of the paper's tables, three of equal width and two with as many (tied) parameters as
GPT; and FF1, which the tables leave out."""
COLOURS = dict(zip(ROWS, ("black", "C3", "C0", "C1", "C3", "C1"), strict=True))

BATCH = 16
"""Sequences of an update, a thirtieth of the paper's: with tens of millions of tokens, more updates
are better than larger ones."""
RATE = 3e-3
"""AdamW's learning rate in our recipe at this batch size (experiments/text_rates)."""
GPUS = 8
QUESTIONS = 50
"""Per subject of MMLU, 2,850 in all: enough to tell knowledge from chance."""

QUICK: dict[str, Any] = {
    "batch": 4, "model.context": 32, "model.steps": 3, "model.heads": 4,
    "compile": False, "precision": "fp32", "eval_batches": 2, "log_every": 5,
}  # fmt: skip


def cases(
    data: Path, recipe: str = "ours", seeds: int = 1, tokens: int = 100_000_000, quick: bool = False
) -> list[Case]:
    """``data`` is a prepared dataset. Models of the same seed see the same ``tokens`` tokens in the
    same order."""
    suffix, found = suffix_of(recipe), []
    for title, preset in ROWS.items():
        changes = {"data.folder": str(data), "batch": BATCH, "accumulation": 1, "graph": True}
        cfg = replace(PRESETS[preset + suffix](), changes)
        if recipe == "ours":
            cfg = replace(cfg, {"optimiser.lr": RATE})
        if quick:
            width = 32 if "equal" in preset else 16
            vocabulary = Dataset.open(data).vocab_size
            cfg = replace(cfg, {**QUICK, "model.width": width, "model.vocab_size": vocabulary})
        iterations = max(20, round(tokens / (cfg.batch * cfg.model.context)))
        changes = {
            "iterations": iterations,
            "optimiser.warmup": min(cfg.optimiser.warmup, iterations // 10),
            "eval_every": max(1, iterations // 20 // cfg.log_every) * cfg.log_every,
            "save_every": max(1, iterations // 4),
        }
        name, labels = preset.removeprefix("owt_"), {"recipe": recipe, "model": title}
        found += Case(f"{recipe}-{name}", replace(cfg, changes), labels).with_seeds(seeds)
    return found


def measure(
    case: Case, run: Path, record: Record, *, held_out: Path | None, mmlu: Path | None, quick: bool
) -> Row:
    """Bits per byte, the loss on the held-out dataset, MMLU, and texts to measure and to show."""
    device = device_named("auto")
    loaded = load_run(run, case.cfg.iterations, device=device)
    result = record.read("result.json")
    names = ("val_loss_full", "val_loss_full_tokens", "val_loss_full_least_context")
    whole = SplitLoss(*(result[name] for name in names))
    row: Row = {"bits": in_bits(whole, loaded.dataset(verify=False))["bits"]}
    with autocast(case.cfg, torch.device(device)):  # computed as in training
        if held_out is not None:
            other = Dataset.open(held_out)
            row["held_out"] = in_bits(split_loss(loaded.model, other.tokens("val")), other)
        if mmlu is not None:
            row["mmlu"] = ask(loaded, mmlu, limit=QUESTIONS).as_dict()
    samples, words = texts.amount(quick)
    written = texts.keep_texts(loaded, record, samples, words)
    row["texts"] = [first_words(text, words // 2) for text in written[:2]]
    return row | {"tokens_per_second": usual_speed(read_metrics(run))}


def completed(
    row: Row, cases: Sequence[Case], to: Path, wanted: Sequence[str], measured: Measure
) -> Row:
    """Measure a run on record again if its row lacks something and its checkpoints still exist."""
    lacks = [name for name in wanted if name not in row]
    case = next((case for case in cases if case.name == row["case"]), None)
    if not lacks or case is None or "error" in row:
        return row
    run = run_folder(to, case.name)
    if not any((run / "checkpoints").glob("step-*")):
        said = f"{case.name}: on record without {', '.join(lacks)}, and {run} has no checkpoint"
        screen.print(said, highlight=False, soft_wrap=True)
        return row
    record = read(to)[case.name]
    row = row | measured(case, run, record)
    put(to, {case.name: record})
    return row


def check_mmlu(cases: Sequence[Case], folder: Path) -> None:
    """Find out before training whether the questions can be asked."""
    subjects_of(["mmlu"], folder)
    for data in {str(case.cfg.data.folder) for case in cases}:
        try:
            Dataset.open(Path(data)).tokenizer.encode(introduction("anatomy"))
        except ValueError as error:
            raise ValueError(f"--mmlu: {data} has no tokens for its questions ({error})") from error


def in_bits(loss: SplitLoss, dataset: Dataset) -> dict[str, Any]:
    """The loss on a dataset's whole validation split, also in bits per byte or character."""
    bits = bits_of_text(loss, dataset.tokens("val"), dataset.tokenizer)
    named = {} if bits is None else {"unit": bits.unit, "bits": bits.per_unit}
    return {"bits": None, **dataclasses.asdict(loss), **named, "dataset": dataset.folder.name}


def reproduce(
    cases: Sequence[Case],
    to: Path,
    *,
    held_out: Path | None = None,
    mmlu: Path | None = None,
    judge: str | None = "gpt2",
    throughput: float | None = None,
    quick: bool = False,
    **options: Any,
) -> list[Path]:
    if held_out is not None and not options.get("plots_only"):
        Dataset.open(held_out)  # fails now, not after hours of training
    if mmlu is not None:
        check_mmlu(cases, mmlu)
    measured = partial(measure, held_out=held_out, mmlu=mmlu, quick=quick)
    rows = carry_out(cases, to, measured, **options)
    wanted = [name for name, at in (("held_out", held_out), ("mmlu", mmlu)) if at is not None]
    if not options.get("plots_only"):
        again = [completed(row, cases, to, wanted, measured) for row in rows]
        rows = put_rows(to, [new for new, row in zip(again, rows, strict=True) if new is not row])
    rows = texts.with_metrics(rows, to, judge, quick)
    rows = sorted(rows, key=lambda row: (list(ROWS).index(row["model"]), row["seed"]))
    files = []
    for (recipe,) in grouped(rows, "recipe"):
        own = [row for row in rows if row["recipe"] == recipe]
        metrics = {case: record.read("metrics.jsonl") for case, record in read(to).items()}
        files += save(curves(own, metrics, COLOURS), to / f"losses-{recipe}", ("png",))
        files.append(write_text(to / f"table-{recipe}.md", loss_table(own, recipe)))
        files.append(write_text(to / f"samples-{recipe}.md", side_by_side(own)))
        if any("mmlu" in row for row in own):
            files.append(write_text(to / f"mmlu-{recipe}.md", mmlu_table(own, QUESTIONS)))
    return [*files, write_text(to / "full_run.md", full_run(rows, throughput))]


def loss_table(rows: Sequence[Row], recipe: str) -> str:
    measured = [row for row in rows if "metrics" in row]
    outside = [row for row in measured if "held_out" in row]
    columns: dict[str, Column] = {
        "model": of_first("{model}"),
        "D": of_first("{width}"),
        "heads": of_first("{heads}"),
        "steps": of_first("{steps}"),
        "tied": lambda own: f"{own[0]['parameters_tied'] / 1e6:.2f}M",
        "untied": lambda own: f"{own[0]['parameters_untied'] / 1e6:.2f}M",
        **tables.LOSSES,
        "bits per byte or character": lambda own: (
            spread([row["bits"] for row in own]) if own[0]["bits"] is not None else "-"
        ),
    }
    if outside:
        columns["held out, whole split"] = held_out_of
    columns["training FLOPs"] = of_first("{training_flops:.3g}")
    columns["seconds"] = of_first("{seconds:,.0f}")
    if any("mmlu" in row for row in rows):
        columns["MMLU, % ± standard error (chance: 25)"] = all_questions
    columns |= texts.metric_columns(measured)
    seen = " or ".join(f"{tokens:,}" for tokens in sorted({row["tokens"] for row in rows}))
    said = (
        f"# Text, recipe: {recipe}\n\nEvery model saw {seen} tokens. "
        "Losses in nats per token. Parameters with the embedding tied to the head, as trained, and "
        "as if it were not.\n\n"
    )
    if outside:
        names = sorted({row["held_out"]["dataset"] for row in outside})
        said += f"Held out: {', '.join(names)}, of which nothing was trained on.\n\n"
    people, groups = texts.people(measured, len(columns)), grouped(rows, "model").values()
    return said + tables.table(columns, groups, *people) + tables.failures(rows)


def held_out_of(rows: Sequence[Row]) -> str:
    losses = [row["held_out"]["loss"] for row in rows if "held_out" in row]
    return spread(losses) if losses else "-"


def side_by_side(rows: Sequence[Row]) -> str:
    """Texts that each model writes without a prompt, as in the paper's figure."""
    own = [runs[0] for runs in grouped(rows, "model").values() if "texts" in runs[0]]
    said = "# Samples\n\nTemperature 0.8, each begun from nothing, the first ones that came.\n\n"
    shown = [
        [text.replace("|", "\\|").replace("\n", "<br>") for text in row["texts"]] for row in own
    ]
    return said + markdown([row["model"] for row in own], zip(*shown, strict=True))


def full_run(rows: Sequence[Row], throughput: float | None) -> str:
    """How long the paper's OpenWebText run takes on 8 GPUs, from tokens per second on one."""
    cfg = PRESETS["owt_nrgpt_ff2w_paper"]()
    tokens = cfg.iterations * cfg.batch * cfg.model.context
    on_gpu = [row for row in rows if row["gpu"] is not None]
    speeds = {
        f"{title}, recipe: {recipe}": statistics.median(row["tokens_per_second"] for row in own)
        for (title, recipe), own in grouped(on_gpu, "model", "recipe").items()
    }
    if throughput is not None:
        speeds["as given"] = throughput
    lines = [
        [name, f"{speed:,.0f}", f"{tokens / speed / GPUS / 3600:,.1f}"]
        for name, speed in speeds.items()
    ]
    machines = ", ".join(sorted({row["gpu"] for row in on_gpu})) or "none here"
    said = (
        f"# The full OpenWebText run\n\n{cfg.iterations:,} updates of {cfg.batch} x "
        f"{cfg.model.context:,} tokens are {tokens / 1e9:.1f}G tokens. Hours on {GPUS} GPUs, each "
        f"as fast as the one measured ({machines}) and none waiting for another: a lower bound.\n\n"
        "    torchrun --nproc-per-node 8 -m nrgpt train owt_nrgpt_ff2w\n\n"
    )
    if not lines:
        return said + "No speed of a GPU is on record here; give one with --throughput.\n"
    return said + markdown(["model", "tokens per second, one GPU", f"hours, {GPUS} GPUs"], lines)
