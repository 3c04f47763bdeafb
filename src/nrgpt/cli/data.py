"""nrgpt data."""

from pathlib import Path
from typing import Annotated

import typer

from ..train.overrides import override
from .common import FREE_FORM, clear_errors, data_app, screen


@data_app.command("listops", context_settings=FREE_FORM)
@clear_errors
def data_listops(
    to: Annotated[Path, typer.Option(help="Folder to make.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Fields to change: modulus=7 ...")
    ] = None,
    released: Annotated[bool, typer.Option(help="The released data, not the paper's.")] = False,
) -> None:
    """Draw ListOps expressions. (`nrgpt train` does so by itself; this is for other uses.)"""
    from ..data.listops import PAPER, RELEASED, prepare_listops

    cfg = override(RELEASED if released else PAPER, overrides or [])
    prepare_listops(cfg, to)
    screen.print(f"{cfg.train:,} + {cfg.validation:,} + {cfg.test:,} expressions are in {to}")


@data_app.command("shakespeare")
@clear_errors
def data_shakespeare(
    to: Annotated[Path, typer.Argument(help="Folder to make.", metavar="FOLDER")],
    source: Annotated[Path | None, typer.Option(help="Another text file instead.")] = None,
) -> None:
    """Prepare the Shakespeare characters (found, or downloaded), or any text with --source."""
    from ..data.shakespeare import prepare_shakespeare

    prepare_shakespeare(to, source=source)


@data_app.command("text")
@clear_errors
def data_text(
    files: Annotated[list[Path], typer.Argument(help=".txt, .txt.xz, .jsonl or .parquet files.")],
    to: Annotated[Path, typer.Option(help="Folder to make.")],
    workers: int = 2,
    separator: Annotated[str, typer.Option(help="Line that ends a document.")] = "<|endoftext|>",
    validation: Annotated[float, typer.Option(help="Share of documents held out.")] = 0.0005,
    field: Annotated[str, typer.Option(help="Where .jsonl and .parquet have the text.")] = "text",
) -> None:
    """Tokenize local files with GPT-2's byte pairs into memory-mapped shards."""
    from ..data.text import prepare_text
    from ..data.tokenizer import GPT2Tokenizer

    prepare_text(
        files,
        to,
        tokenizer=GPT2Tokenizer(),
        separator=separator,
        field=field,
        validation=validation,
        workers=workers,
    )


@data_app.command("hub")
@clear_errors
def data_hub(
    to: Annotated[Path, typer.Option(help="Folder to make.")],
    name: Annotated[str, typer.Argument()] = "Skylion007/openwebtext",
    split: Annotated[str, typer.Option(help="The hub's split to take.")] = "train",
    field: Annotated[str, typer.Option(help="The column that has the text.")] = "text",
    workers: int = 2,
    validation: Annotated[float, typer.Option(help="Share of documents held out.")] = 0.0005,
) -> None:
    """Stream and tokenize a dataset of the Hugging Face hub."""
    from ..data.text import prepare_hub
    from ..data.tokenizer import GPT2Tokenizer

    prepare_hub(
        name,
        to,
        split=split,
        field=field,
        tokenizer=GPT2Tokenizer(),
        validation=validation,
        workers=workers,
    )


@data_app.command("verify")
@clear_errors
def data_verify(folder: Path) -> None:
    """Check every byte of a prepared dataset."""
    from ..data.shards import Dataset

    dataset = Dataset.open(folder, verify=True)
    for split in dataset.manifest["splits"]:
        screen.print(f"{split}: {len(dataset.tokens(split)):,} tokens, all in order")
