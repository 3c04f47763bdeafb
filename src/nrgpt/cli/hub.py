"""nrgpt export, push."""

from typing import Annotated

from typer import Option

from .common import Checkpoint, NewFolder, RunFolder, app, screen


@app.command()
def export(run: RunFolder, to: NewFolder, checkpoint: Checkpoint = None) -> None:
    """Write a run as a Hugging Face model: weights, tokenizer, model card and code."""
    from ..hf import export_run

    export_run(run, to, step=checkpoint)
    screen.print(f"AutoModelForCausalLM.from_pretrained({str(to)!r}) will load it", soft_wrap=True)


@app.command()
def push(
    run: RunFolder,
    repo: Annotated[str, Option(help="NAME or OWNER/NAME on the Hugging Face Hub.")],
    private: Annotated[bool, Option(help="Make a new repository private.")] = False,
    checkpoint: Checkpoint = None,
) -> None:
    """Export a run and upload it to the Hugging Face Hub."""
    from ..hf import push_run

    screen.print(push_run(run, repo, private=private, step=checkpoint), soft_wrap=True)
