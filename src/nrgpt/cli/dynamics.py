"""nrgpt trajectory, certificate, adaptive, convergence."""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from typer import Option

from ..dynamics.adaptive import loss_against_steps
from ..dynamics.convergence import stability, transients
from ..dynamics.figures import save, token_label, write_figures
from ..dynamics.page import write_page
from ..dynamics.plots import adaptive_figure, convergence_figure
from ..dynamics.relax import Stop
from ..dynamics.trajectory import trajectory as watch
from ..explore.models import certificates
from ..explore.page import refuse_other_pages
from ..extras import MissingExtra
from ..model.network import IGNORED_TARGET
from ..train.runs import Run
from .common import (
    Steps,
    app,
    file_to_write,
    folder_for_results,
    folder_to_write,
    in_float64,
    open_run,
    screen,
    table_of,
    with_options_of,
)

Texts = Annotated[int, Option(min=1, help="Validation texts, each as long as the context.")]


def validation_texts(loaded: Run, count: int) -> tuple[Tensor, Tensor]:
    """The first ``count`` texts of the validation split, without overlap, and their targets."""
    context = loaded.cfg.model.context
    stream = loaded.first_tokens("val", count * context + 1)
    length = min(context, len(stream) - 1)
    count = max(1, min(count, (len(stream) - 1) // length))
    starts = length * np.arange(count)
    text = stream.windows(starts, length + 1).to(loaded.model.tokens.device)
    return text[:, :-1], text[:, 1:]


@app.command()
@with_options_of(open_run)
def trajectory(
    loaded: Run,
    text: Annotated[
        str | None, Option(help="Text to watch; default the first 64 tokens of the split.")
    ] = None,
    split: Annotated[str, Option(help="Split for the default text.")] = "val",
    steps: Steps = None,
    to: Annotated[Path | None, Option(help="Folder; default RUN/trajectory.")] = None,
    energies: Annotated[
        bool | None, Option(help="Of every term; default if there are any: baselines have none.")
    ] = None,
) -> None:
    """Watch tokens on their energy landscapes: figures, numbers and an interactive page.

    `nrgpt explore` shows the same live, for any text that you type.
    """
    if text is None:
        length = min(64, loaded.cfg.model.context)
        tokens = loaded.first_tokens(split, length + 1).read(0, length + 1).tolist()
    else:
        tokens = [*loaded.encode(text), IGNORED_TARGET]  # the next token is unknown
    folder = folder_to_write(to or folder_for_results(loaded.folder) / "trajectory")
    refuse_other_pages(folder / "index.html")
    both = torch.tensor([tokens], device=loaded.model.tokens.device)
    top = min(5, loaded.cfg.model.vocab_size)
    energies = loaded.model.is_watched if energies is None else energies
    seen = watch(loaded.model, both[:, :-1], both[:, 1:], steps, energies=energies, top=top)
    label = token_label(loaded.tokenizer)
    try:
        files = write_figures(seen, folder, label)
    except MissingExtra as error:  # there is still the page
        files = []
        screen.print(f"no PNG and PDF: {error}", soft_wrap=True, markup=False)
    seen.save(folder / "trajectory.npz")
    title = f"{loaded.folder.name}, checkpoint {loaded.step}"
    proved = certificates(loaded.model)
    write_page(seen, folder / "index.html", label, title=title, certificates=proved)
    screen.print(
        f"{len(tokens) - 1} tokens over {seen.steps} steps (trained with {seen.trained_steps}), "
        f"checkpoint {loaded.step}"
    )
    for file in (*files, folder / "trajectory.npz", folder / "index.html"):
        screen.print(str(file), soft_wrap=True)


@app.command()
@with_options_of(open_run)
def certificate(loaded: Run, texts: Texts = 8, steps: Steps = None) -> None:
    """Is descent guaranteed? If not, which part prevents it, and what happens on real text?"""
    model, idx = in_float64(loaded.model), None
    try:
        idx, _ = validation_texts(loaded, texts)
    finally:  # the proof needs no data
        found = model.certificate(idx=idx, steps=steps)
        screen.print(str(found), highlight=False, soft_wrap=True)


@app.command()
@with_options_of(open_run)
def adaptive(
    loaded: Run,
    rule: Annotated[str, Option(help="energy, force, entropy, kl or argmax.")] = "kl",
    tolerances: Annotated[str, Option(help="Comma-separated.")] = "1e-4,1e-3,1e-2,1e-1",
    patience: Annotated[int, Option(help="How often in a row the rule must hold.")] = 1,
    texts: Texts = 32,
    steps: Steps = None,
    to: Annotated[Path | None, Option(help="File for a PNG of loss against steps.")] = None,
) -> None:
    """Stop each token early by a rule: what does that cost, and what does it save?"""
    try:
        values = [0.0] if rule == "argmax" else [float(value) for value in tolerances.split(",")]
    except ValueError:
        wanted = "numbers with commas between them"
        raise ValueError(f"tolerances = {tolerances!r}: must be {wanted}") from None
    if to is not None:
        file_to_write(to.with_suffix(".png"))
    rules = [Stop(rule, value, patience) for value in values]  # type: ignore[arg-type]
    idx, targets = validation_texts(loaded, texts)
    costs = loss_against_steps(loaded.model, idx, targets, rules, steps=steps)
    title = f"{rule}, {idx.shape[0]} texts of {idx.shape[1]} tokens"
    headings = ("tolerance", "loss (nats)", "above all steps", "mean steps", "computed")
    table = table_of(title, *headings)
    for cost in costs:
        name = "all steps" if cost.stop is None else f"{cost.stop.tolerance:g}"
        losses = f"{cost.loss:.4f}", f"{cost.loss - costs[0].loss:+.4f}"
        table.add_row(name, *losses, f"{cost.mean_steps:.2f}", f"{cost.computed:.2f}")
    screen.print(table)
    if to is not None:
        save(adaptive_figure(costs), to, ("png",))
        screen.print(f"figure in {to}")


@app.command()
@with_options_of(open_run)
def convergence(
    loaded: Run,
    steps: Annotated[
        int | None, Option(help="Steps to take; default 50 times the trained number.")
    ] = None,
    tolerance: Annotated[
        float, Option(help="At rest: each step changes g by at most this share.")
    ] = 1e-3,
    texts: Texts = 8,
    to: Annotated[Path | None, Option(help="Folder for the figures, as PNG.")] = None,
) -> None:
    """When do tokens come to rest, and do they return when pushed? Ctrl-C: use the steps so far."""
    if to is not None:
        folder_to_write(to)
    model = in_float64(loaded.model)
    idx, _ = validation_texts(loaded, texts)
    with torch.no_grad():
        *_, last = model.states(idx)
    steps = 50 * model.cfg.steps if steps is None else steps
    title = f"{idx.shape[0]} texts of {idx.shape[1]} tokens, {steps} steps"
    headings = ("past", "at rest", "median steps of these", "left of a push", "power of t")
    table = table_of(title, *headings)
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
