"""nrgpt evaluate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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

if TYPE_CHECKING:
    from rich.table import Table

    from ..measure.loss import Bits, SplitLoss
    from ..train.runs import Run


@app.command()
@clear_errors
def evaluate(
    run: RunFolder,
    split: str = "val",
    steps: Steps = None,
    stride: Annotated[
        int | None, typer.Option(help="1 gives every token its full context.")
    ] = None,
    step: Checkpoint = None,
    loss: Annotated[bool, typer.Option(help="The split's loss, and ListOps' accuracy.")] = True,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Text metrics on samples, and on human text.")
    ] = False,
    samples: Annotated[int, typer.Option(help="--metrics: texts.")] = 8,
    words: Annotated[int, typer.Option(help="--metrics: words of each text.")] = 200,
    temperature: Annotated[float, typer.Option(help="--metrics: of the samples.")] = 0.8,
    judge: Annotated[
        str, typer.Option(help="--metrics: causal LM for perplexity, name or folder; or none.")
    ] = "gpt2",
    seed: Annotated[int, typer.Option(help="--metrics: of the samples.")] = 0,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-eval: mmlu,mmlu_paper,lambada_openai,...")
    ] = None,
    mmlu: Annotated[
        Path | None, typer.Option(help="MMLU's csv files; default $NRGPT_MMLU, else the Hub.")
    ] = None,
    include: Annotated[
        Path | None, typer.Option(help="--tasks: a folder of further task files.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="--tasks: most questions of each task.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="--tasks: prompts at a time.")] = 16,
    device: Device = "auto",
) -> None:
    """Loss on every token of a split, ListOps accuracy, text metrics, tasks of lm-eval.

    Everything is shown and written to RUN/evaluation.json, one entry for each set of settings.
    """
    from ..evaluate.record import FILE, read_record, write_record

    loaded, home = open_run(run, step, device), folder_for_results(run)
    home.mkdir(parents=True, exist_ok=True)
    read_record(home)  # a file that cannot be added to is better found before the work
    common: dict[str, Any] = {
        "checkpoint": loaded.step,
        "steps": loaded.model.check_steps(steps),
        "split": split,
    }
    if loss:
        results = losses(loaded, split, steps, stride)
        write_record(home, common | {"stride": stride}, results)
    if metrics:
        sampled: dict[str, Any] = {
            "samples": samples, "words": words, "temperature": temperature, "judge": judge,
            "seed": seed,
        }  # fmt: skip
        results = {"metrics": text_metrics_of(loaded, split, steps, device, **sampled)}
        write_record(home, common | sampled, results)
    if tasks is not None:
        import logging

        from ..evaluate.tasks import run_tasks

        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it tells of every default it takes
        names = list(dict.fromkeys(name for name in tasks.split(",") if name))
        asked = run_tasks(
            loaded,
            names,
            steps=steps,
            batch_size=batch_size,
            limit=limit,
            mmlu=mmlu,
            include=include,
        )
        for table in asked.tables():
            screen.print(table)
        if asked.truncated:
            screen.print(
                f"{asked.truncated:,} prompts were longer than the model's context of "
                f"{loaded.cfg.model.context} tokens: their beginnings were cut off"
            )
        del common["split"]  # the tasks bring their own texts
        write_record(home, common | {"tasks": names, "limit": limit}, {"tasks": asked.as_dict()})
    if loss or metrics or tasks is not None:
        screen.print(f"written to {home / FILE}", soft_wrap=True)


def losses(loaded: "Run", split: str, steps: int | None, stride: int | None) -> dict[str, Any]:
    """The loss, in nats and in bits of text, and the accuracy on ListOps: shown, and for JSON."""
    import dataclasses

    from ..measure.loss import bits_of_text, split_loss

    dataset = loaded.dataset()
    tokens = dataset.tokens(split)
    loss = split_loss(loaded.model, tokens, stride=stride, steps=steps, progress=True)
    bits = bits_of_text(loss, tokens, dataset.tokenizer)
    screen.print(loss_table(split, loss, bits))
    screen.print(
        f"checkpoint at step {loaded.step}; each token with at least {loss.least_context} before it"
    )
    results: dict[str, Any] = {
        "loss": dataclasses.asdict(loss),
        "bits": None if bits is None else dataclasses.asdict(bits),
    }
    if loaded.cfg.data.task == "listops":
        from ..data.listops import read_tests
        from ..measure.listops import listops_accuracy

        tests = read_tests(dataset.folder)
        result = listops_accuracy(
            loaded.model, tests, dataset.tokenizer, steps=steps, progress=True
        )
        screen.print(result.table())
        results["listops"] = result.as_dict()
    return results


def loss_table(split: str, loss: "SplitLoss", bits: "Bits | None") -> "Table":
    from rich.table import Table

    table = Table()
    for heading in ("per", f"{split} loss", "number"):
        table.add_column(heading, justify="left" if heading == "per" else "right")
    table.add_row("token", f"{loss.loss:.4f} nats", f"{loss.tokens:,}")
    if bits is not None:
        table.add_row(bits.unit, f"{bits.per_unit:.4f} bits", f"{bits.units:,}")
    return table


def text_metrics_of(
    loaded: "Run",
    split: str,
    steps: int | None,
    device: str,
    *,
    samples: int,
    words: int,
    temperature: float,
    judge: str,
    seed: int,
) -> dict[str, Any]:
    from ..evaluate.samples import human_texts, kind_of, model_texts
    from ..evaluate.text import load_measures, text_metrics
    from ..train.distributed import device_named

    kind_of(loaded.tokenizer)  # an error for ListOps, before anything is loaded
    # Loaded before any text is written: a judge that cannot be had is better known at once.
    measures = load_measures(None if judge == "none" else judge, device_named(device))
    written = model_texts(
        loaded,
        number=samples,
        words=words,
        temperature=temperature,
        steps=steps,
        seed=seed,
        progress=True,
    )
    tokens = loaded.dataset(verify=False).tokens(split)
    human = human_texts(tokens, loaded.tokenizer, number=samples, words=words)
    texts = {"this model": written, f"people ({split})": human}
    result = text_metrics(texts, words, measures, judge, progress=True)
    screen.print(result.table())
    return result.as_dict()
