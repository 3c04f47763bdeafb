"""Compare the speed of two versions of the package in one process: ratios, not times.

    git archive COMMIT src/nrgpt | tar -x -C /tmp/before     # or any folder with another version
    python dev/compare_speed.py /tmp/before/src [NAME ...]

Each case is set up for both versions. They then take turns, and the medians of their turns are
compared: a ratio above 1 means that the version in this tree is faster. Results are printed as they
come, as lines of JSON.
"""

import importlib
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

OTHER = "nrgpt_before"
SMALL = {
    "Shakespeare": {"vocab_size": 65, "context": 256, "width": 128, "heads": 4, "steps": 8},
    "ListOps": {"vocab_size": 17, "context": 128, "width": 64, "heads": 4, "steps": 5},
}
Call = Callable[[], Any]


def load_other(src: Path) -> None:
    """The other version under another name, and so are the operations that it registers."""
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(src / "nrgpt", folder / OTHER)
    for file in (folder / OTHER).rglob("*.py"):
        text = file.read_text()
        file.write_text(text.replace('"nrgpt::', f'"{OTHER}::').replace("watch()  #", "#"))
    sys.path.insert(0, str(folder))


def suites(package: str) -> Any:
    return importlib.import_module(f"{package}.bench.suites")


def training(package: str, device: torch.device, **changes: Any) -> Call:
    """A step of a large model, as `nrgpt train` takes it."""
    own = suites(package)
    cfg, batch = own.large(device)
    batch = batch // 2 if changes.get("coupling") == "full" else batch
    model = own.LanguageModel(replace(cfg, **changes))
    return own.Step(model, batch, device, compile=device.type == "cuda")


def recorded(
    package: str, device: torch.device, name: str, runs: int = 1, optimiser: str = "adamw"
) -> Call:
    """Updates of small models, recorded as a CUDA graph on a GPU."""
    own = suites(package)
    is_cuda = device.type == "cuda"
    cfg, batch = own.ModelConfig(**SMALL[name]), 64 if is_cuda else 4
    options = {"runs": runs, "compile": is_cuda, "optimiser": optimiser}
    step = own.RecordedStep(cfg, batch, device, **options)
    return lambda: [step() for _ in range(20 if is_cuda else 1)][-1]


def generation(package: str, device: torch.device, rows: int, **changes: Any) -> Call:
    """New tokens after a long text, with the exact cache."""
    own = suites(package)
    is_cuda = device.type == "cuda"
    small = {"vocab_size": 65, "context": 512, "width": 256, "heads": 8, "steps": 8}
    cfg = own.ModelConfig(**({"vocab_size": 50_304} if is_cuda else small), **changes)
    model = own.LanguageModel(cfg).to(device).eval()
    model = model.bfloat16() if is_cuda else model
    prompts = torch.randint(cfg.vocab_size, (rows, 256)).tolist()
    decoder = own.make_decoder(model, prompts, "exact", None, None)
    return own.more_tokens(decoder, 16)


CASES: dict[str, Callable[[str, torch.device], Call]] = {
    "train, low rank": training,
    "train, full rank": lambda p, d: training(p, d, coupling="full"),
    "train, rgpt_parallel": lambda p, d: training(p, d, block="rgpt_parallel"),
    "Shakespeare": lambda p, d: recorded(p, d, "Shakespeare"),
    "Shakespeare, Muon": lambda p, d: recorded(p, d, "Shakespeare", optimiser="muon"),
    "ListOps": lambda p, d: recorded(p, d, "ListOps"),
    "ListOps, 16 packed": lambda p, d: recorded(p, d, "ListOps", runs=16),
    "generate, 1 text": lambda p, d: generation(p, d, 1),
    "generate, 64 texts": lambda p, d: generation(p, d, 64 if d.type == "cuda" else 8),
    "generate, 1 text, gpt": lambda p, d: generation(p, d, 1, block="gpt"),
}


def seconds(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(name: str, device: torch.device, budget: float) -> dict[str, Any]:
    """Take turns until the budget of seconds is spent, at least ten each."""
    calls = []
    for package in (OTHER, "nrgpt"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        call = CASES[name](package, device)
        for _ in range(6):
            call()
        calls.append(call)
    times: list[list[float]] = [[], []]
    start = time.perf_counter()
    while len(times[0]) < 10 or time.perf_counter() - start < budget:
        order = (0, 1) if len(times[0]) % 2 else (1, 0)
        for which in order:
            times[which].append(seconds(calls[which], device))
    before, now = (statistics.median(own) for own in times)
    pairs = sorted(a / b for a, b in zip(*times, strict=True))
    return {
        "case": name,
        "ratio": round(before / now, 3),
        "middle half of the ratios": [
            round(pairs[len(pairs) // 4], 3),
            round(pairs[-1 - len(pairs) // 4], 3),
        ],
        "before_ms": round(1e3 * before, 3),
        "now_ms": round(1e3 * now, 3),
        "turns": len(pairs),
    }


def main(
    before: Annotated[Path, typer.Argument(help="Folder that holds another version of nrgpt.")],
    cases: Annotated[list[str] | None, typer.Argument()] = None,
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    budget: Annotated[float, typer.Option(help="Seconds of turns for each case.")] = 6.0,
    to: Annotated[Path | None, typer.Option(help="File that lines are added to.")] = None,
) -> None:
    load_other(before)
    where = torch.device(device)
    for name in cases or CASES:
        try:
            found = compare(name, where, budget)
        except Exception:
            traceback.print_exc()
            found = {"case": name, "error": traceback.format_exc()[-600:]}
        line = json.dumps(found)
        print(line, flush=True)
        if to is not None:
            with to.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    typer.run(main)
