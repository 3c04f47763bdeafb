"""nrgpt fields: what every field of a configuration means."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from typing import Annotated, Any

from rich.table import Table
from rich.text import Text
from typer import Argument

from ..check import suggestion
from ..train.config import TrainConfig
from .common import app, screen

SAID_BY_THEIR_NAMES = {
    "vocab_size": "Kinds of tokens.",
    "heads": "Heads of the attention.",
    "block": "NRGPT, or one of its baselines.",
    "norm": "How a state becomes g.",
    "norm_eps": "Added to the variance in the norm.",
    "head_bias": "A bias for each token in the head.",
    "init_std": "Standard deviation of weights at the start.",
    "task": "What the dataset is.",
    "muon_lr": "Muon's learning rate.",
    "beta1": "AdamW's decay of the mean gradient.",
    "beta2": "AdamW's decay of its square.",
    "decay": "How the learning rate falls after the warm-up.",
    "iterations": "Updates.",
    "seed": "Of weights, batches and dropout (in data.listops: of the expressions).",
    "device": "Where to train.",
    "compile": "Use torch.compile.",
    "log_every": "Iterations between lines of metrics.jsonl.",
    "eval_every": "Iterations between estimates of the losses.",
    "save_every": "Iterations between checkpoints.",
    "tensorboard": "Log to RUN/tensorboard.",
    "wandb": "Log to Weights & Biases.",
    "first_exit": "early_exits: the earliest step.",
    "min_args": "Fewest arguments of a call.",
    "max_args": "Most arguments of a call.",
    "train": "Training expressions.",
    "validation": "Validation expressions.",
    "test": "Test expressions.",
}
"""For fields that have no text of their own in the code."""


def texts_of(cls: type) -> dict[str, str]:
    """The strings below the fields of a configuration, by field."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def described(cls: type = TrainConfig, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Dotted name, type, default and meaning of each field."""
    texts, hints = texts_of(cls), typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        hint, name = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(hint):
            rows += described(hint, f"{name}.")  # type: ignore[arg-type]
            continue
        text = texts.get(field.name) or SAID_BY_THEIR_NAMES.get(field.name, "")
        rows.append((name, type_name(hint), str(field.default), text))
    return rows


def type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(typing.get_args(hint))
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


@app.command()
def fields(
    name: Annotated[
        str, Argument(help="A field or a group: model, data, optimiser, model.rate ...")
    ] = "",
) -> None:
    """Explain the fields of a configuration, or those whose names begin with NAME."""
    everything = described()
    rows = [row for row in everything if row[0].startswith(name)]
    if not rows:
        known = {row[0] for row in everything}
        raise ValueError(f"there is no field {name!r}{suggestion(name, known)}")
    table = Table(show_header=True, show_lines=False, pad_edge=False)
    table.add_column("field = default", overflow="fold", ratio=2)
    table.add_column("meaning", overflow="fold", ratio=3)
    for field, kind, default, text in rows:
        of_type = "" if kind in ("int", "float", "bool", "str") else f" ({kind})"
        table.add_row(Text.assemble((field, "bold"), f" = {default}"), Text(text + of_type))
    screen.print(table)
