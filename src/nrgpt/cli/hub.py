"""nrgpt export, push."""

from typing import Annotated

from typer import Option

from .common import Checkpoint, NewFolder, RunFolder, app, open_run, screen


@app.command()
def export(
    run: RunFolder,
    to: NewFolder,
    checkpoint: Checkpoint = None,
    onnx: Annotated[bool, Option("--onnx", help="Write an ONNX file instead, to --to.")] = False,
    steps: Annotated[int | None, Option(help="--onnx: default as trained.")] = None,
) -> None:
    """Write a run as a Hugging Face model: weights, tokenizer, model card and code."""
    if onnx:
        from ..hf.onnx_file import export_onnx

        error = export_onnx(open_run(run, checkpoint, "cpu").model, to, steps=steps)
        screen.print(f"{to}: its logits are the model's up to {error:.1e}", soft_wrap=True)
        return
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
