"""The paper's appendix on FLOPs: the parts of each model, and the whole by PyTorch's counter."""

import json
from pathlib import Path

import torch

from ..language_model import LanguageModel
from ..model.config import ModelConfig
from ..model.flops import block_of_shapes, flops_per_token, parts_per_step
from ..train.presets import CERTIFIED, MODELS, PRESETS, paper_model
from ..train.speed import counted_flops_per_token
from .tables import Column, Row, markdown, of_first, table, write_text

SIZES: dict[str, dict[str, int]] = {
    "ListOps": {"width": 64, "heads": 1, "steps": 5, "context": 128, "vocab_size": 27},
    "Shakespeare": {"width": 128, "heads": 1, "steps": 8, "context": 256, "vocab_size": 65},
    "OpenWebText, 1 head": {"width": 768, "heads": 1, "steps": 12},
    "OpenWebText": {"width": 768, "heads": 12, "steps": 12},
}
LARGE = {"context": 1_024, "vocab_size": 50_304}
FULL_RUNS = (
    "owt_gpt_paper", "owt_rgpt_parallel_paper", "owt_nrgpt_ff2w_paper",
    "owt_rgpt_parallel_equal_parameters_paper", "owt_nrgpt_ff2w_equal_parameters_paper",
    "owt_nrgpt_ff2w",
)  # fmt: skip


def models(sizes: dict[str, int]) -> dict[str, ModelConfig]:
    """The paper's recurrent models at one size, and two of ours. Ratios are to the first."""
    sizes = {**LARGE, **sizes}
    heads = 4 if sizes["heads"] == 1 else sizes["heads"]
    ours = {**sizes, "heads": heads}
    return {
        "RGPT-parallel": paper_model("rgpt_parallel", **sizes),
        "NRGPT FF1, 4D, full rank": paper_model("nrgpt_ff1", **sizes),
        "NRGPT FF1, 8D, full rank": paper_model("nrgpt_ff1", hidden_factor=8, **sizes),
        "NRGPT FF2W, full rank": paper_model("nrgpt_ff2w", **sizes),
        f"NRGPT FF2W, low rank, {heads} heads": ModelConfig(**{**MODELS["nrgpt_ff2w"], **ours}),
        f"NRGPT certified, {heads} heads": ModelConfig(**{**CERTIFIED, **ours}),
    }


def rows_of(size: str) -> list[Row]:
    rows: list[Row] = []
    for name, cfg in models(SIZES[size]).items():
        parts = parts_per_step(cfg, cfg.context)
        row: Row = {
            "size": size,
            "model": name,
            "block_parameters": sum(p.numel() for p in block_of_shapes(cfg).parameters()),
            "attention": parts["attention"],
            "feedforward": parts["feedforward"],
            "block": sum(parts.values()),
            "block_causal": sum(parts_per_step(cfg, cfg.context, causal=True).values()),
            "training": flops_per_token(cfg),
        }
        rows.append(row)
        for key in ("attention", "feedforward", "block", "block_causal"):
            row[f"{key}_ratio"] = row[key] / rows[0][key]
        row["per_parameter"] = row["block"] / row["block_parameters"]
        row["per_parameter_ratio"] = row["per_parameter"] / rows[0]["per_parameter"]
        row["parameter_ratio"] = row["block_parameters"] / rows[0]["block_parameters"]
        row["counter"] = counted_flops_per_token(cfg) / row["training"]
    return rows


def full_run(preset: str) -> Row:
    """A whole run on OpenWebText."""
    cfg = PRESETS[preset]()
    with torch.device("meta"):
        counts = LanguageModel(cfg.model).parameter_counts()
    tokens = cfg.iterations * cfg.batch * cfg.model.context
    training = flops_per_token(cfg.model, batch=cfg.batch // cfg.accumulation)
    row = {"preset": preset, "tied": counts.tied, "untied": counts.untied, "training": training}
    return {**row, "tokens": tokens, "total": training * tokens}


def reproduce(to: Path) -> list[Path]:
    rows = [row for size in SIZES for row in rows_of(size)]
    runs = [full_run(preset) for preset in FULL_RUNS]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, *runs])
    return [write_text(to / "results.jsonl", text), write_text(to / "flops.md", page(rows, runs))]


def in_units(key: str, unit: float, form: str) -> Column:
    return lambda own: form.format(own[0][key] / unit)


PARTS: dict[str, Column] = {
    "model": of_first("{model}"),
    "parameters of the block": of_first("{block_parameters:,} (x {parameter_ratio:.2f})"),
    "attention": of_first("{attention:,.0f} (x {attention_ratio:.2f})"),
    "feed-forward": of_first("{feedforward:,.0f} (x {feedforward_ratio:.2f})"),
    "block": of_first("{block:,.0f} (x {block_ratio:.2f})"),
    "block / parameters": of_first("{per_parameter:.2f} (x {per_parameter_ratio:.2f})"),
    "counter": of_first("{counter:.6f}"),
}
WHOLE: dict[str, Column] = {
    "preset": of_first("{preset}"),
    "tied": in_units("tied", 1e6, "{:.1f}M"),
    "untied": in_units("untied", 1e6, "{:.1f}M"),
    "training, GFLOP per token": in_units("training", 1e9, "{:.3f}"),
    "tokens": in_units("tokens", 1e9, "{:.1f}G"),
    "EFLOP in all": in_units("total", 1e18, "{:.1f}"),
}


def page(rows: list[Row], runs: list[Row]) -> str:
    said = (
        "# FLOPs\n\nMatrix-product FLOPs of one token in one step of the block, forward; attention "
        "counts all keys. Ratios are to RGPT-parallel of the same width. The last column compares "
        "the whole model, forward and backward, with PyTorch's counter (1 is equal).\n\n"
    )
    for size in SIZES:
        cfg = models(SIZES[size])["RGPT-parallel"]
        said += f"## {size}: D {cfg.width}, {cfg.heads} heads, context {cfg.context}\n\n"
        said += table(PARTS, [[row] for row in rows if row["size"] == size]) + "\n"
    said += "## Whole runs\n\n" + table(WHOLE, [[run] for run in runs])
    return said + corrections(rows)


def corrections(rows: list[Row]) -> str:
    """What the paper's appendix says, beside what the counts say."""
    found = {(row["size"], row["model"]): row for row in rows}
    one, twelve = "OpenWebText, 1 head", "OpenWebText"
    ff1, wide, ff2w = (f"NRGPT {kind}, full rank" for kind in ("FF1, 4D", "FF1, 8D", "FF2W"))
    low = "NRGPT FF2W, low rank, 12 heads"

    def ratio(key: str, size: str, *models: str) -> str:
        return ", ".join(f"{found[size, model][f'{key}_ratio']:.2f}" for model in models)

    three = (ff1, wide, ff2w)
    lines = {
        '"anywhere from 1-2x the FLOP cost of an equivalent RecGPT at constant parameters"': (
            f"FF1 4D, FF1 8D, FF2W: {ratio('block', one, *three)} with one head (width 768), but "
            f"{ratio('block', twelve, *three)} with the 12 full-rank heads of the OpenWebText runs "
            f"({ratio('block_causal', twelve, *three)} if the kernel skips what the mask hides). "
            f"Per parameter of the block: {ratio('per_parameter', one, *three)} and "
            f"{ratio('per_parameter', twelve, *three)}. Low-rank heads bring FF2W to "
            f"{ratio('block', twelve, low)}, per parameter {ratio('per_parameter', twelve, low)}."
        ),
        '"for a single head ... approximately the same", "slightly fewer FLOPs"': (
            f"{ratio('attention', 'ListOps', ff2w)} (ListOps), "
            f"{ratio('attention', 'Shakespeare', ff2w)} (Shakespeare), "
            f"{ratio('attention', one, ff2w)} (width 768): markedly fewer, since keys and values "
            "are g itself and need no projection."
        ),
        '"for multiple heads however, NRGPT costs more"': (
            f"{ratio('attention', twelve, ff2w)} times with 12 heads."
        ),
        '"always ~2x the FLOP count of a standard transformer\'s FF of the same width"': (
            f"FF1 4D, FF1 8D, FF2W: {ratio('feedforward', twelve, *three)}."
        ),
    }
    return "\n## What the paper says\n\n" + markdown(["paper", "counted"], lines.items())
