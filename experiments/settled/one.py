"""Train one model and measure what its energy does: python -m experiments.settled.one JSON ...

The JSON says which preset, what to change of it, and whether to measure more than losses:

    {"name": "settled", "preset": "owt_nrgpt_settled", "set": ["seed=1"], "in_full": true}

"tokens" measures that many validation tokens only, to try a job on a small machine; "held_out" is a
prepared dataset of other text; "benchmarks" asks those whose files are in that folder; "keep", a
description, packs the run as a model of the zoo (dev/add_to_zoo.py) into OUT/NAME.tar.
Data: DATA of experiments/descent/prepare.py for presets of text, which are all trained as TEXT
says, or the prepared dataset that "data" names; ListOps and Shakespeare as always.
"""

import argparse
import fcntl
import json
import math
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.descent.prepare import unpack
from torch import Tensor

from nrgpt.data.shards import Dataset, TokenStream, write_dataset
from nrgpt.data.tokenizer import GPT2Tokenizer
from nrgpt.dynamics.adaptive import loss_against_steps
from nrgpt.dynamics.descent import check_descent
from nrgpt.dynamics.meaning import corrupted, detection
from nrgpt.dynamics.relax import Stop
from nrgpt.evaluate.benchmarks import NAMES
from nrgpt.evaluate.benchmarks.asking import ask
from nrgpt.evaluate.benchmarks.questions import questions
from nrgpt.evaluate.preference import preferences
from nrgpt.language_model import LanguageModel
from nrgpt.measure.loss import split_loss
from nrgpt.model.flops import flops_per_token
from nrgpt.train.config import TrainConfig
from nrgpt.train.loop import train
from nrgpt.train.overrides import override, replace
from nrgpt.train.presets import PRESETS
from nrgpt.train.runs import Run, load_run
from nrgpt.train.speed import autocast

TEXT = [
    "batch=16",
    "accumulation=1",
    "iterations=1000",
    "optimiser.lr=3e-3",
    "optimiser.warmup=100",
    "log_every=50",
    "eval_every=500",
    "save_every=1000",
    "final_evaluation=false",
]
"""16.4M tokens, from random places of 17.0M: 62 % of these are seen at least once."""
PAIRS = 1_000_000
"""Pairs (token, step) whose energies are compared."""
WINDOWS = 96
"""Texts, each as long as the context, for losses at other numbers of steps."""

Record = Callable[..., None]


def text_dataset(data: Path, folder: Path) -> Path:
    """The packed tokens as a dataset of the package."""
    if not (folder / "manifest.json").exists():
        splits = {name: iter([unpack((data / f"{name}.xz").read_bytes())]) for name in SPLITS}
        write_dataset(folder, GPT2Tokenizer(), splits, source={"packed": str(data.name)})
    return folder


SPLITS = ("train", "val")


def config_of(job: dict[str, Any], data: Path, scratch: Path) -> TrainConfig:
    cfg = PRESETS[job["preset"]]()
    if cfg.data.task == "text":
        folder = job.get("data") or text_dataset(data, scratch / "text")
        cfg = override(replace(cfg, {"data.folder": str(folder)}), TEXT)
    return override(cfg, job.get("set", []))


def windows(stream: TokenStream, model: LanguageModel, count: int) -> tuple[Tensor, Tensor]:
    """The first texts of the split, without overlap, and their targets."""
    length = model.cfg.context
    count = max(1, min(count, (len(stream) - 1) // length))
    text = stream.windows(length * np.arange(count), length + 1).to(model.tokens.device)
    return text[:, :-1], text[:, 1:]


def depths(model: LanguageModel, stream: TokenStream) -> dict[str, float]:
    """Loss of disjoint texts after half, as many, twice and four times the trained steps."""
    T, context = model.cfg.steps, model.cfg.context
    part = TokenStream("val", [stream.read(0, min(len(stream), WINDOWS * context + 1))])
    steps = sorted({max(1, T // 2), T, 2 * T, 4 * T} if model.cfg.block != "gpt" else {T})
    return {str(t): split_loss(model, part, stride=context, steps=t).loss for t in steps}


@torch.no_grad()
def rises(cfg: TrainConfig, model: LanguageModel, idx: Tensor, *, mixed: bool) -> dict[str, Any]:
    """Steps of tokens that raise the energy in the forward pass: all, and by more than 1e-6 of it.
    Energies are always computed in float32; ``mixed``: the states are those of autocast."""
    pairs, any_, more, worst = 0, 0, 0, -math.inf
    model.eval()
    for some in idx.split(4):
        before, start = None, None
        exactly = torch.autocast(some.device.type, enabled=False)
        precision = autocast(cfg, some.device) if mixed else exactly
        with precision:
            states: Iterator[Tensor] = model.states(some)
            for x in states:
                start = x if start is None else start
                now = torch.stack(list(model.energies(x, start=start).values())).sum(0)
                if before is not None:
                    relative = (now - before) / torch.maximum(now.abs(), before.abs())
                    pairs += relative.numel()
                    any_ += int((now > before).sum())
                    more += int((relative > 1e-6).sum())
                    worst = max(worst, float(relative.max()))
                before = now
        if pairs >= PAIRS // (8 if mixed else 1):
            break
    return {"pairs": pairs, "rises": any_, "beyond_rounding": more, "largest": worst}


def within_steps(model: LanguageModel, idx: Tensor) -> dict[str, Any]:
    """For keys that move: rises among the keys as they were before each step, of which the
    certificate speaks."""
    pairs, found = 0, []
    for some in idx.split(4):
        found.append(check_descent(model, some).within)
        pairs += some.numel() * model.cfg.steps
        if pairs >= PAIRS:
            break
    share = sum(rise.share for rise in found) / len(found)
    return {"pairs": pairs, "beyond_rounding": share, "largest": max(r.relative for r in found)}


def stopping(model: LanguageModel, idx: Tensor, targets: Tensor) -> list[dict[str, float]]:
    """Loss and mean steps of rules that stop each token alone, and of fixed numbers of steps."""
    rules = [Stop("kl", tolerance) for tolerance in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)]
    costs = loss_against_steps(model, idx, targets, rules)
    found = [{"loss": cost.loss, "steps": cost.mean_steps} for cost in costs]
    for t in range(1, model.cfg.steps):
        _, loss = model(idx, targets, steps=t, want_logits=False, dropout=False)
        assert loss is not None
        found.append({"loss": loss.item(), "fixed": t})
    return found


@torch.no_grad()
def strange_texts(model: LanguageModel, idx: Tensor, *, seed: int = 0) -> dict[str, Any]:
    """How well each signal of `nrgpt.dynamics.meaning` tells texts with random tokens in them from
    others (AUROC). Half of the texts choose the best signal; the other half say how good it is."""
    found = {}
    generator = torch.Generator().manual_seed(seed)
    for share in (0.02, 0.1):
        strange = corrupted(idx, share, model.cfg.vocab_size, generator)
        halves = []
        for half in (slice(None, None, 2), slice(1, None, 2)):
            detected = detection(model, idx[half], strange[half])
            halves.append({d.signal: round(d.auroc, 4) for d in detected})
        found[str(share)] = halves
    return found


def measure(
    cfg: TrainConfig, model: LanguageModel, stream: TokenStream, record: Record, *, in_full: bool
) -> None:
    with autocast(cfg, model.tokens.device):
        whole = split_loss(model, stream, stride=cfg.model.context)
        record(disjoint_windows={"loss": whole.loss, "tokens": whole.tokens})
        record(losses_by_steps=depths(model, stream))
    if cfg.model.block != "nrgpt" or not in_full:
        return
    texts = -(-PAIRS // (cfg.model.steps * cfg.model.context)) + 4
    idx, targets = windows(stream, model, texts)
    record(rises=rises(cfg, model, idx, mixed=False))
    record(rises_mixed=rises(cfg, model, idx, mixed=True))
    if cfg.model.past == "moving":
        record(within_steps=within_steps(model, idx))
    record(certificate=str(model.certificate(idx=idx[:2])))
    if cfg.model.past == "settled":
        few = max(1, min(len(idx), 16_384 // cfg.model.context))
        with torch.no_grad():
            record(stopping=stopping(model, idx[:few], targets[:few]))
        short, count = min(64, cfg.model.context), min(200, idx.numel() // 64)
        record(strange=strange_texts(model, idx.reshape(-1, short)[:count]))


def benchmarks(run: Run, folder: Path, limit: int | None) -> dict[str, Any]:
    """Those of nrgpt evaluate --tasks, and what energies prefer among BLiMP's sentences."""
    found: dict[str, Any] = {name: ask(run, name, folder, limit=limit) for name in NAMES}
    if run.model.cfg.block == "nrgpt":
        pairs = questions("blimp", folder)[:limit]
        found["blimp, energies"] = preferences(run, pairs, steps=None, batch_size=64)
    return found


def pack(run: Path, name: str, what: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "dev/add_to_zoo.py", str(run), name, what, folder]
        subprocess.run(command, check=True, timeout=300)
        with tarfile.open(out / f"{name}.tar", "w") as tar:
            tar.add(Path(folder) / name, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=json.loads)
    parser.add_argument("--data", type=Path, default=Path("gpu_data"))
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    job, start = args.job, time.time()
    sys.argv[1:] = [json.dumps(job)]  # records keep the command; folders of a machine mean nothing
    cfg = config_of(job, args.data, args.scratch)

    def record(**values: Any) -> None:
        line = {"name": job["name"], "seconds": round(time.time() - start, 1), **values}
        with open(args.out / "results.jsonl", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)

    run = args.scratch / job["name"]
    result = train(cfg, run)
    loaded = load_run(run, device="cuda" if torch.cuda.is_available() else "cpu")
    model = loaded.model
    counts = model.parameter_counts()
    record(
        job=job,
        parameters=counts.total,
        forward_flops=flops_per_token(cfg.model, training=False),
        result={k: v for k, v in result.items() if not isinstance(v, list)},
    )
    kept = args.out / "runs" / job["name"]
    kept.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "metrics.jsonl", "result.json", "environment.json"):
        if (run / name).exists():
            shutil.copy(run / name, kept)
    stream = loaded.dataset().tokens("val")
    if "tokens" in job:
        stream = TokenStream("val", [stream.read(0, job["tokens"])])
    measure(cfg, model, stream, record, in_full=job.get("in_full", True))
    if "held_out" in job:
        other = Dataset.open(Path(job["held_out"])).tokens("val")
        with autocast(cfg, model.tokens.device):
            record(held_out=split_loss(model, other, stride=cfg.model.context).loss)
    if "keep" in job:
        pack(run, job["name"], job["keep"], args.out)
    if "benchmarks" in job:
        record(benchmarks=benchmarks(loaded, Path(job["benchmarks"]), job.get("questions")))
    record(done=True)
    (args.scratch / f"{job['name']}.done").touch()


if __name__ == "__main__":
    main()
