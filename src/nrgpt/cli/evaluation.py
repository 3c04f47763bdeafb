"""nrgpt evaluate."""

import dataclasses
import logging
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Option

from ..data.listops import read_tests
from ..evaluate.mmlu import is_mmlu
from ..evaluate.record import FILE, read_record, write_record
from ..evaluate.samples import human_texts, kind_of, model_texts
from ..evaluate.tasks import known_tasks, mmlu_folder, run_tasks
from ..evaluate.text import Measure, load_measures, text_metrics
from ..extras import need
from ..measure.listops import listops_accuracy
from ..measure.loss import bits_of_text, masked_loss, split_loss
from ..train.runs import Run
from .common import (
    Seed,
    Steps,
    app,
    folder_for_results,
    folder_to_write,
    open_run,
    screen,
    with_options_of,
)


@app.command()
@with_options_of(open_run)
def evaluate(
    loaded: Run,
    split: str = "val",
    steps: Steps = None,
    stride: Annotated[int | None, Option(help="1 gives every token its full context.")] = None,
    loss: Annotated[bool, Option(help="Loss on the split, and accuracy on ListOps.")] = True,
    metrics: Annotated[
        bool, Option("--metrics", help="Text metrics on samples, and on human text.")
    ] = False,
    samples: Annotated[int, Option(help="--metrics: number of texts.")] = 8,
    words: Annotated[int, Option(help="--metrics: words per text.")] = 200,
    temperature: Annotated[float, Option(help="--metrics: sampling temperature.")] = 0.8,
    judge: Annotated[
        str, Option(help="--metrics: causal LM, name or folder, for perplexity; or none.")
    ] = "gpt2",
    seed: Seed = 0,
    tasks: Annotated[
        str | None,
        Option(help="Benchmarks: blimp,piqa,mmlu,... or any task of lm-eval."),
    ] = None,
    mmlu: Annotated[
        Path | None, Option(help="MMLU's csv files; default $NRGPT_MMLU, else the Hub.")
    ] = None,
    task_data: Annotated[
        Path | None, Option(help="The benchmarks' files; default $NRGPT_TASKS, else the Hub.")
    ] = None,
    include: Annotated[Path | None, Option(help="--tasks: a folder with more task files.")] = None,
    limit: Annotated[int | None, Option(min=1, help="--tasks: most questions per task.")] = None,
    batch_size: Annotated[int, Option(min=1, help="--tasks: prompts per batch.")] = 16,
) -> None:
    """Loss on every token of a split, ListOps accuracy, text metrics, tasks of lm-eval.

    Prints the results and writes them to RUN/evaluation.json, one entry per set of settings.
    """
    home = folder_for_results(loaded.folder)
    folder_to_write(home)
    # Whatever is needed is asked for now, not after the work.
    read_record(home)
    measures = measures_for(loaded, judge) if metrics else {}
    names = list(dict.fromkeys(name for name in (tasks or "").split(",") if name))
    if tasks is not None and not names:
        raise ValueError(f"--tasks {tasks!r}: it names no task")
    if tasks is not None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it reports every default
        manager = known_tasks(names, include, task_data)
        if any(map(is_mmlu, names)):
            mmlu_folder(mmlu)
    common = {"checkpoint": loaded.step, "steps": loaded.model.check_steps(steps)}
    of_split = common | {"split": split}
    if loss:
        results = losses(loaded, split, steps, stride)
        write_record(home, of_split | {"stride": stride}, results)
    if metrics:
        sampled: dict[str, Any] = {
            "samples": samples, "words": words, "temperature": temperature, "judge": judge,
            "seed": seed,
        }  # fmt: skip
        results = {"metrics": text_metrics_of(loaded, split, steps, measures, **sampled)}
        write_record(home, of_split | sampled, results)
    if tasks is not None:
        options: dict[str, Any] = {"batch_size": batch_size, "mmlu": mmlu, "manager": manager}
        asked = run_tasks(loaded, names, steps=steps, limit=limit, **options)
        for table in asked.tables():
            screen.print(table)
        if asked.truncated:
            screen.print(
                f"{asked.truncated:,} prompts were longer than the model's context of "
                f"{loaded.cfg.model.context} tokens: their beginnings were cut off"
            )
        write_record(home, common | {"tasks": names, "limit": limit}, {"tasks": asked.as_dict()})
    if loss or metrics or tasks is not None:
        screen.print(f"written to {home / FILE}", soft_wrap=True)


def losses(loaded: Run, split: str, steps: int | None, stride: int | None) -> dict[str, Any]:
    """Print the loss, in nats and in bits, and the accuracy on ListOps. Return them for JSON."""
    dataset = loaded.dataset()
    tokens = dataset.tokens(split)
    if loaded.cfg.masking is not None:
        found = masked_loss(loaded.model, tokens, loaded.cfg.masking, steps=steps)
        screen.print(f"{split} loss {found.loss:.4f} nats, of {found.tokens:,} missing tokens")
        return {"loss": dataclasses.asdict(found)}
    loss = split_loss(loaded.model, tokens, stride=stride, steps=steps, progress=True)
    bits = bits_of_text(loss, tokens, dataset.tokenizer)
    table = Table()
    for heading in ("per", f"{split} loss", "number"):
        table.add_column(heading, justify="left" if heading == "per" else "right")
    table.add_row("token", f"{loss.loss:.4f} nats", f"{loss.tokens:,}")
    if bits is not None:
        table.add_row(bits.unit, f"{bits.per_unit:.4f} bits", f"{bits.units:,}")
    screen.print(table)
    screen.print(
        f"checkpoint {loaded.step}; each token with at least {loss.least_context} before it"
    )
    results: dict[str, Any] = {
        "loss": dataclasses.asdict(loss),
        "bits": None if bits is None else dataclasses.asdict(bits),
    }
    if loaded.cfg.data.task == "listops":
        tests = read_tests(dataset.folder)
        result = listops_accuracy(
            loaded.model, tests, dataset.tokenizer, steps=steps, progress=True
        )
        screen.print(result.table())
        results["listops"] = result.as_dict()
    return results


def measures_for(loaded: Run, judge: str) -> dict[str, Measure]:
    """What the text metrics need: packages, and models that may not be on this machine."""
    kind_of(loaded.tokenizer)  # an error for ListOps
    need("spellchecker", "--metrics")
    return load_measures(None if judge == "none" else judge, str(loaded.model.tokens.device))


def text_metrics_of(
    loaded: Run,
    split: str,
    steps: int | None,
    measures: dict[str, Measure],
    *,
    samples: int,
    words: int,
    judge: str,
    **how: Any,
) -> dict[str, Any]:
    sizes = {"number": samples, "words": words}
    written = model_texts(loaded, **sizes, steps=steps, progress=True, **how)
    tokens = loaded.dataset(verify=False).tokens(split)
    human = human_texts(tokens, loaded.tokenizer, **sizes)
    texts = {"this model": written, f"people ({split})": human}
    result = text_metrics(texts, words, measures, judge, progress=True)
    screen.print(result.table())
    return result.as_dict()
