"""nrgpt data."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ..data.listops import PAPER, RELEASED, prepare_listops
from ..data.shakespeare import prepare_shakespeare
from ..data.shards import Dataset
from ..data.text import OPENWEBTEXT, prepare_hub, prepare_text
from ..data.tokenizer import GPT2Tokenizer
from ..train.overrides import override
from .common import FREE_FORM, NewFolder, app, screen

data_app = typer.Typer(help="Prepare and check datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Field = Annotated[str, Option(help="Field or column that holds the text.")]
Validation = Annotated[float, Option(help="Share of documents to hold out.")]
Workers = Annotated[int, Option(help="Processes that tokenize.")]


@data_app.command("listops", context_settings=FREE_FORM)
def data_listops(
    to: NewFolder,
    overrides: Annotated[list[str] | None, Argument(help="Fields to change: modulus=7 ...")] = None,
    released: Annotated[bool, Option(help="The released data, not the paper's.")] = False,
) -> None:
    """Draw ListOps expressions. `nrgpt train` does this by itself; this is for other uses."""
    cfg = override(RELEASED if released else PAPER, overrides or [])
    prepare_listops(cfg, to)
    screen.print(f"{cfg.train:,} + {cfg.validation:,} + {cfg.test:,} expressions are in {to}")


@data_app.command("shakespeare")
def data_shakespeare(
    to: Annotated[Path, Argument(help="Folder to create.", metavar="FOLDER")],
    source: Annotated[Path | None, Option(help="Use this text file instead.")] = None,
) -> None:
    """Prepare Shakespeare as characters (a local copy or a download), or any text by --source."""
    prepare_shakespeare(to, source=source)


@data_app.command("text")
def data_text(
    files: Annotated[list[Path], Argument(help=".txt, .txt.xz, .jsonl or .parquet files.")],
    to: NewFolder,
    workers: Workers = 2,
    separator: Annotated[str, Option(help="Line that ends a document.")] = "<|endoftext|>",
    validation: Validation = 0.0005,
    field: Field = "text",
) -> None:
    """Tokenize local files with GPT-2's byte-pair encoding into memory-mapped shards."""
    options = {"tokenizer": GPT2Tokenizer(), "validation": validation, "workers": workers}
    prepare_text(files, to, separator=separator, field=field, **options)


@data_app.command("hub")
def data_hub(
    to: NewFolder,
    name: Annotated[str, Argument()] = OPENWEBTEXT,
    split: Annotated[str, Option(help="Split of the dataset.")] = "train",
    field: Field = "text",
    workers: Workers = 2,
    validation: Validation = 0.0005,
) -> None:
    """Stream and tokenize a dataset from the Hugging Face Hub."""
    options = {"tokenizer": GPT2Tokenizer(), "validation": validation, "workers": workers}
    prepare_hub(name, to, split=split, field=field, **options)


@data_app.command("verify")
def data_verify(folder: Path) -> None:
    """Check every byte of a prepared dataset."""
    dataset = Dataset.open(folder, verify=True)
    for split in dataset.manifest["splits"]:
        screen.print(f"{split}: {len(dataset.tokens(split)):,} tokens, all in order")
