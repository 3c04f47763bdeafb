"""nrgpt data."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from ..data.listops import PAPER, RELEASED, prepare_listops
from ..data.shakespeare import prepare_shakespeare
from ..data.shards import Dataset
from ..data.text import OPENWEBTEXT, prepare_hub, prepare_text
from ..train.data import data_root, located
from ..train.overrides import override
from .common import FREE_FORM, app, screen

data_app = typer.Typer(help="Prepare and check datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

To = Annotated[
    Path | None, Option(help="Folder to create; default in $NRGPT_DATA, where trainings look.")
]
Field = Annotated[str, Option(help="Field or column that holds the text.")]
Validation = Annotated[
    float | None, Option(help="Share of documents to hold out; default what suits the size.")
]
Workers = Annotated[int | None, Option(help="Processes that tokenize; default 1 or 2, by size.")]
Kind = Annotated[str, Option(help="characters, bpe (byte pairs of its own), gpt2, or auto.")]
Vocabulary = Annotated[int | None, Option(help="Tokens of --tokenizer bpe; default by size.")]


def report(folder: Path) -> None:
    dataset = Dataset.open(folder, verify=False)
    sizes = ", ".join(
        f"{split} {len(dataset.tokens(split)):,}" for split in dataset.manifest["splits"]
    )
    kind = dataset.tokenizer.kind
    source = dataset.manifest["source"]
    task = "shakespeare" if source.get("kind") == "shakespeare" else "text"
    screen.print(
        f"{folder}: tokens: {sizes}; vocabulary {dataset.vocab_size:,} ({kind})\n"
        f"train on it with data.task={task} data.folder={json.dumps(str(folder))} "
        f"model.vocab_size={dataset.vocab_size}",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


@data_app.command("listops", context_settings=FREE_FORM)
def data_listops(
    to: To = None,
    overrides: Annotated[list[str] | None, Argument(help="Fields to change: modulus=7 ...")] = None,
    released: Annotated[bool, Option(help="The released data, not the paper's.")] = False,
) -> None:
    """Draw ListOps expressions. `nrgpt train` does this by itself; this is for other uses."""
    cfg = override(RELEASED if released else PAPER, overrides or [])
    folder = to or data_root() / "listops"
    prepare_listops(cfg, folder)
    screen.print(f"{cfg.train:,} + {cfg.validation:,} + {cfg.test:,} expressions are in {folder}")


@data_app.command("shakespeare")
def data_shakespeare(to: To = None) -> None:
    """Prepare Shakespeare as characters, from a download or a local copy (NRGPT_SHAKESPEARE)."""
    folder = to or data_root() / "shakespeare"
    prepare_shakespeare(folder)
    report(folder)


@data_app.command("text")
def data_text(
    files: Annotated[list[Path], Argument(help=".txt, .txt.xz, .jsonl or .parquet files.")],
    to: To = None,
    tokenizer: Kind = "gpt2",
    vocabulary: Vocabulary = None,
    validation: Validation = None,
    field: Field = "text",
    separator: Annotated[str, Option(help="Line that ends a document.")] = "<|endoftext|>",
    workers: Workers = None,
) -> None:
    """Tokenize local files into memory-mapped shards. `nrgpt train --text` does this by itself."""
    options: dict[str, Any] = {"tokenizer": tokenizer, "vocabulary": vocabulary}
    options |= {"validation": validation, "workers": workers}
    folder = to or data_root() / "text"
    prepare_text(files, folder, separator=separator, field=field, **options)
    report(folder)


@data_app.command("hub")
def data_hub(
    name: Annotated[str, Argument(help="A dataset on the Hugging Face Hub.")] = OPENWEBTEXT,
    to: To = None,
    tokenizer: Kind = "gpt2",
    vocabulary: Vocabulary = None,
    validation: Validation = None,
    field: Field = "text",
    split: Annotated[str, Option(help="Split of the dataset.")] = "train",
    workers: Workers = None,
) -> None:
    """Stream and tokenize a dataset from the Hugging Face Hub. If stopped, it goes on there."""
    options: dict[str, Any] = {"tokenizer": tokenizer, "vocabulary": vocabulary}
    options |= {"validation": validation, "workers": workers}
    folder = to or data_root() / "text"
    prepare_hub(name, folder, split=split, field=field, **options)
    report(folder)


@data_app.command("verify")
def data_verify(folder: Path) -> None:
    """Check every byte of a prepared dataset."""
    dataset = Dataset.open(located(folder), verify=True)
    for split in dataset.manifest["splits"]:
        screen.print(f"{split}: {len(dataset.tokens(split)):,} tokens, all in order")
