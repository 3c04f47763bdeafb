"""nrgpt sample, trajectory, bench."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .common import (
    Checkpoint,
    Device,
    RunFolder,
    Steps,
    app,
    clear_errors,
    folder_for_results,
    open_run,
    screen,
)


@app.command()
@clear_errors
def sample(
    run: RunFolder,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    tokens: Annotated[int, typer.Option(help="New tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Only the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Only the likeliest with this sum.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: fewer repetitions.")] = 1.0,
    cache: Annotated[str, typer.Option(help="exact, none (the same, slower) or frozen.")] = "exact",
    seed: int = 0,
    steps: Steps = None,
    step: Checkpoint = None,
    device: Device = "auto",
) -> None:
    """Let a trained model continue a text; it is printed as it comes."""
    import torch

    from ..decode.generate import Sampling, stream

    loaded = open_run(run, step, device)
    is_listops = loaded.cfg.data.task == "listops"
    start = loaded.encode(prompt or ("<end>" if is_listops else "\n"))
    stop = loaded.encode("<end>") if is_listops else ()
    device_of = loaded.model.tokens.device
    text = list(start)
    written = ""

    def write(more: str) -> None:
        nonlocal written
        whole = more.rstrip("\ufffd")  # half of a character: wait for the rest
        sys.stdout.write(whole[len(written) :])
        sys.stdout.flush()
        written = whole

    for token in stream(
        loaded.model,
        [start],
        max_new_tokens=tokens,
        stop=stop,
        sampling=Sampling(repetition_penalty, temperature, top_k, top_p),
        generator=torch.Generator(device_of).manual_seed(seed),
        steps=steps,
        cache=cache,  # type: ignore[arg-type]
    ):
        text += token.values()
        write(loaded.decode(text))
    write(loaded.decode(text) + "\n")


@app.command(name="zoo")
@clear_errors
def list_zoo() -> None:
    """List the trained models that come with the package.

    zoo:NAME stands for a run folder: nrgpt trajectory zoo:listops_30_steps
    """
    from .. import zoo

    table = Table()
    for heading in ("name", "parameters", "what"):
        table.add_column(heading, no_wrap=heading != "what")
    for name in zoo.names():
        about = zoo.about(name)
        table.add_row(zoo.PREFIX + name, f"{about['parameters']:,}", about["what"])
    screen.print(table)


@app.command()
@clear_errors
def trajectory(
    run: RunFolder,
    text: Annotated[
        str | None, typer.Option(help="Text to watch; default the split's first 64 tokens.")
    ] = None,
    split: Annotated[str, typer.Option(help="Where the default text comes from.")] = "val",
    steps: Steps = None,
    to: Annotated[Path | None, typer.Option(help="Folder; default RUN/trajectory.")] = None,
    step: Checkpoint = None,
    energies: Annotated[bool, typer.Option(help="Without them, baselines can be watched.")] = True,
    device: Device = "auto",
) -> None:
    """Watch tokens on their energy landscapes: figures, numbers and a page to hover over."""
    import torch

    from ..dynamics.figures import token_label, write_figures
    from ..dynamics.page import write_page
    from ..dynamics.trajectory import trajectory as watch
    from ..model.network import IGNORED_TARGET

    loaded = open_run(run, step, device)
    if text is None:
        length = min(64, loaded.cfg.model.context)
        tokens = loaded.dataset().tokens(split).read(0, length + 1).tolist()
    else:
        tokens = [*loaded.encode(text), IGNORED_TARGET]  # nobody knows what follows
    both = torch.tensor([tokens], device=loaded.model.tokens.device)
    top = min(5, loaded.cfg.model.vocab_size)
    seen = watch(loaded.model, both[:, :-1], both[:, 1:], steps, energies=energies, top=top)
    folder = to or folder_for_results(run) / "trajectory"
    label = token_label(loaded.tokenizer)
    files = write_figures(seen, folder, label)
    seen.save(folder / "trajectory.npz")
    title = f"{run.name}, checkpoint at step {loaded.step}"
    write_page(seen, folder / "index.html", label, title=title)
    screen.print(
        f"{len(tokens) - 1} tokens over {seen.steps} steps (trained with {seen.trained_steps}), "
        f"checkpoint at step {loaded.step}"
    )
    for file in (*files, folder / "trajectory.npz", folder / "index.html"):
        screen.print(str(file), soft_wrap=True)


@app.command()
@clear_errors
def bench(
    suite: Annotated[
        str, typer.Option(help="train, small, packed, generate, memory or all.")
    ] = "all",
    profile: Annotated[bool, typer.Option(help="Write a trace of the training step too.")] = False,
    compile: Annotated[
        bool | None, typer.Option(help="With torch.compile; by default on a GPU only.")
    ] = None,
    to: Annotated[Path, typer.Option(help="Folder for the results as JSON.")] = Path("out/bench"),
    device: Device = "auto",
) -> None:
    """Measure speed and memory, compared within one run, on this machine."""
    import torch

    from ..bench.suites import SUITES
    from ..bench.suites import profile as profile_training
    from ..check import check_choice
    from ..kernels.dispatch import explain
    from ..train.distributed import device_named

    check_choice("suite", suite, [*SUITES, "all"])
    where = torch.device(device_named(device))
    if compile is None:
        compile = where.type == "cuda"
    screen.print(explain(where))
    to.mkdir(parents=True, exist_ok=True)
    for name in SUITES if suite == "all" else [suite]:
        reports = SUITES[name](where, compile=compile)
        for report in reports:
            screen.print(report.table())
        path = to / f"{name}.json"
        path.write_text(json.dumps([report.as_dict() for report in reports], indent=1))
        screen.print(f"written to {path}")
    if profile:
        print(profile_training(where, compile=compile, trace=to / "trace.json"))
        screen.print(f"trace written to {to / 'trace.json'}")
