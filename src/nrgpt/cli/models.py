"""nrgpt sample, zoo, bench."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import torch
from rich.table import Table
from typer import Option

from .. import zoo
from ..bench import SUITES
from ..bench.suites import profile as profile_training
from ..check import check_choice
from ..files import write_atomically
from ..kernels.dispatch import explain
from ..text_model import of_run
from ..train.distributed import device_named
from ..train.runs import Run
from .common import Device, Seed, Steps, app, folder_to_write, open_run, screen, with_options_of


@app.command()
@with_options_of(open_run)
def sample(
    loaded: Run,
    prompt: Annotated[str | None, Option(help="Text to continue.")] = None,
    tokens: Annotated[int, Option(help="New tokens.")] = 200,
    temperature: Annotated[
        float | None, Option(help="0 is greedy; default 0.8, and 0 for ListOps.")
    ] = None,
    top_k: Annotated[int | None, Option(help="Only the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, Option(help="Only the likeliest tokens, up to this probability.")
    ] = None,
    repetition_penalty: Annotated[float, Option(help="Above 1: fewer repetitions.")] = 1.0,
    cache: Annotated[str, Option(help="exact, none (the same, slower) or frozen.")] = "exact",
    seed: Seed = 0,
    steps: Steps = None,
) -> None:
    """Let a trained model continue a text, printed token by token."""
    model = of_run(loaded)
    pieces = model.stream(
        prompt or "",
        max_new_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        steps=steps,
        cache=cache,
    )
    sys.stdout.write(model.decode(model.encode(prompt or "")))
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@app.command(name="zoo")
def list_zoo() -> None:
    """List the trained models that come with the package.

    Use zoo:NAME wherever a run folder is asked for: nrgpt trajectory zoo:listops_30_steps
    """
    table = Table()
    for heading in ("name", "parameters", "what"):
        table.add_column(heading, no_wrap=heading != "what")
    for name in zoo.names():
        about = zoo.about(name)
        table.add_row(zoo.PREFIX + name, f"{about['parameters']:,}", about["what"])
    screen.print(table)


@app.command()
def bench(
    suite: Annotated[
        str, Option(help="train, small, packed, generate, memory, serve or all.")
    ] = "all",
    profile: Annotated[bool, Option(help="Also write a trace of training updates.")] = False,
    compile: Annotated[
        bool | None, Option(help="Use torch.compile; by default on a GPU only.")
    ] = None,
    to: Annotated[Path, Option(help="Folder for the results as JSON.")] = Path("out/bench"),
    device: Device = "auto",
) -> None:
    """Measure speed and memory on this machine, with everything compared in one run."""
    check_choice("suite", suite, [*SUITES, "all"])
    where = torch.device(device_named(device))
    if compile is None:
        compile = where.type == "cuda"
    screen.print(explain(where))
    folder_to_write(to)
    for name in SUITES if suite == "all" else [suite]:
        reports = SUITES[name](where, compile=compile)
        for report in reports:
            screen.print(report.table())
        path = to / f"{name}.json"
        fields = [dataclasses.asdict(report) for report in reports]
        write_atomically(path, json.dumps(fields, indent=1))
        screen.print(f"written to {path}")
    if profile:
        print(profile_training(where, compile=compile, trace=to / "trace.json"))
        screen.print(f"trace written to {to / 'trace.json'}")
