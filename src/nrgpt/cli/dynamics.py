"""nrgpt certificate, adaptive, convergence."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .common import Checkpoint, Device, RunFolder, Steps, app, clear_errors, open_run, screen

if TYPE_CHECKING:
    from torch import Tensor

    from ..train.runs import Run

Texts = Annotated[int, typer.Option(help="Validation texts, each as long as the context.")]


def validation_texts(loaded: "Run", count: int) -> "tuple[Tensor, Tensor]":
    """The first texts of the validation split, one after the other, and their next tokens."""
    import torch

    stream = loaded.dataset().tokens("val")
    length = min(loaded.cfg.model.context, len(stream) - 1)
    count = max(1, min(count, (len(stream) - 1) // length))
    rows = [torch.from_numpy(stream.read(i * length, length + 1)) for i in range(count)]
    text = torch.stack(rows).to(loaded.model.tokens.device)
    return text[:, :-1], text[:, 1:]


@app.command()
@clear_errors
def certificate(
    run: RunFolder,
    texts: Texts = 8,
    steps: Steps = None,
    step: Checkpoint = None,
    device: Device = "auto",
) -> None:
    """Is descent guaranteed, which part is to blame if not, and what happens on real text?"""
    loaded = open_run(run, step, device)
    model, idx = loaded.model.double(), None
    try:
        idx, _ = validation_texts(loaded, texts)
    finally:  # the proof needs no data
        found = model.certificate(idx=idx, steps=steps)
        screen.print(str(found), highlight=False, soft_wrap=True)


@app.command()
@clear_errors
def adaptive(
    run: RunFolder,
    rule: Annotated[str, typer.Option(help="energy, force, entropy, kl or argmax.")] = "kl",
    tolerances: Annotated[str, typer.Option(help="Comma-separated.")] = "1e-4,1e-3,1e-2,1e-1",
    patience: Annotated[int, typer.Option(help="How often in a row the rule must hold.")] = 1,
    texts: Texts = 32,
    steps: Steps = None,
    step: Checkpoint = None,
    to: Annotated[Path | None, typer.Option(help="A PNG of loss against steps.")] = None,
    device: Device = "auto",
) -> None:
    """Stop each token when its rule says so: what does that cost, and what does it save?"""
    from ..dynamics.adaptive import loss_against_steps
    from ..dynamics.figures import save
    from ..dynamics.plots import adaptive_figure
    from ..dynamics.relax import Stop

    try:
        values = [0.0] if rule == "argmax" else [float(value) for value in tolerances.split(",")]
    except ValueError:
        wanted = "numbers with commas between them"
        raise ValueError(f"tolerances = {tolerances!r}: must be {wanted}") from None
    rules = [Stop(rule, value, patience) for value in values]  # type: ignore[arg-type]
    loaded = open_run(run, step, device)
    idx, targets = validation_texts(loaded, texts)
    costs = loss_against_steps(loaded.model, idx, targets, rules, steps=steps)
    table = Table(title=f"{rule}, {idx.shape[0]} texts of {idx.shape[1]} tokens")
    for heading in ("tolerance", "loss (nats)", "above all steps", "mean steps", "computed"):
        table.add_column(heading, justify="right")
    for cost in costs:
        name = "all steps" if cost.stop is None else f"{cost.stop.tolerance:g}"
        more = f"{cost.loss - costs[0].loss:+.4f}"
        table.add_row(
            name, f"{cost.loss:.4f}", more, f"{cost.mean_steps:.2f}", f"{cost.computed:.2f}"
        )
    screen.print(table)
    if to is not None:
        save(adaptive_figure(costs), to, ("png",))
        screen.print(f"figure in {to}")


@app.command()
@clear_errors
def convergence(
    run: RunFolder,
    steps: Annotated[
        int | None, typer.Option(help="Steps to take; default 50 times the trained number.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="At rest: each step changes g by no more than this share.")
    ] = 1e-3,
    texts: Texts = 8,
    step: Checkpoint = None,
    to: Annotated[Path | None, typer.Option(help="Folder for a PNG of each.")] = None,
    device: Device = "auto",
) -> None:
    """When do tokens come to rest, and do they come back when pushed? Ctrl-C: with fewer steps."""
    import torch

    from ..dynamics.convergence import stability, transients
    from ..dynamics.figures import save
    from ..dynamics.plots import convergence_figure

    loaded = open_run(run, step, device)
    model = loaded.model.double()
    idx, _ = validation_texts(loaded, texts)
    with torch.no_grad():
        *_, last = model.states(idx)
    steps = 50 * model.cfg.steps if steps is None else steps
    table = Table(title=f"{idx.shape[0]} texts of {idx.shape[1]} tokens, {steps} steps")
    for heading in ("past", "at rest", "median steps of these", "left of a push", "power of t"):
        table.add_column(heading, justify="right")
    for name, past in (("in parallel", None), ("frozen", last)):
        found = transients(model, idx, steps=steps, tolerance=tolerance, past=past, progress=True)
        taken = found.steps  # fewer, if it was interrupted
        pushed = stability(model, idx, settle=taken, steps=taken, past=past, progress=True)
        table.add_row(
            name,
            f"{100 * found.share_at_rest.mean().item():.1f} %",
            f"{found.lengths.nanmedian().item():g}",
            f"{pushed.left.median().item():.2f}",
            f"{-pushed.powers.median().item():.2f}",
        )
        if to is not None:
            file = to / f"convergence-{name.replace(' ', '-')}"
            save(convergence_figure(found, pushed), file, ("png",))
    screen.print(table)
