"""nrgpt export, push."""

from pathlib import Path
from typing import Annotated

import typer

from .common import Checkpoint, RunFolder, app, clear_errors, screen


@app.command()
@clear_errors
def export(
    run: RunFolder,
    to: Annotated[Path, typer.Option(help="Folder to make.")],
    step: Checkpoint = None,
) -> None:
    """Write a run as a Hugging Face model: weights, tokenizer, model card and code."""
    try:
        from ..hf import export_run
    except ImportError as error:
        raise ValueError(str(error)) from None

    export_run(run, to, step=step)
    screen.print(f"AutoModelForCausalLM.from_pretrained({str(to)!r}) will load it", soft_wrap=True)


@app.command()
@clear_errors
def push(
    run: RunFolder,
    repo: Annotated[str, typer.Option(help="NAME or OWNER/NAME on the Hugging Face Hub.")],
    private: Annotated[bool, typer.Option(help="For your eyes only, if it is new.")] = False,
    step: Checkpoint = None,
) -> None:
    """Export a run and upload it to the Hugging Face Hub."""
    try:
        from ..hf import push_run
    except ImportError as error:
        raise ValueError(str(error)) from None

    screen.print(push_run(run, repo, private=private, step=step), soft_wrap=True)
