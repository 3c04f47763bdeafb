"""Pages made from the code: every command with its options, every field of the configuration."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from nrgpt.cli import app
from nrgpt.data.listops import ListOpsConfig
from nrgpt.model.config import ModelConfig
from nrgpt.train.config import DataConfig, OptimiserConfig, TrainConfig


def commands_page() -> str:
    parts = [
        "# Every command\n\nMade from the code; `nrgpt COMMAND --help` says the same. A RUN is "
        "a run folder or `zoo:NAME`.\n"
    ]
    for name, command in commands(typer.main.get_command(app)):
        parts.append(f"\n## nrgpt {name}\n\n{paragraphs(command.help)}\n")
        usage = [name_of(p) for p in command.params if is_argument(p)]
        parts.append(f"\n```\nnrgpt {' '.join([name, *usage, '[OPTIONS]'])}\n```\n")
        rows = [row(p) for p in command.params if p.name != "help"]
        if rows:
            parts.append("\n| option | default | meaning |\n|---|---|---|\n" + "".join(rows))
        if command.epilog:
            parts.append(f"\n{command.epilog}\n")
    return "".join(parts)


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Typer has a click of its own, so commands are told by what they have."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        elif not command.hidden:
            yield prefix + name, command


def is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def name_of(parameter: Any) -> str:
    if not is_argument(parameter):
        return ", ".join(n for n in (*parameter.opts, *parameter.secondary_opts) if "--" in n)
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def row(parameter: Any) -> str:
    value = parameter.default
    is_plain = isinstance(value, int | float | str | Path) and value not in ("", False)
    default = "required" if parameter.required else f"`{value}`" if is_plain else ""
    return f"| `{name_of(parameter)}` | {default} | {cell(parameter.help or '')} |\n"


def cell(text: str) -> str:
    return " ".join(text.replace("[bold]", "**").replace("[/bold]", "**").split()).replace(
        "|", "\\|"
    )


def paragraphs(text: str | None) -> str:
    """Help as Markdown: a paragraph that is a command becomes code."""
    found = []
    for part in inspect.cleandoc(text or "").split("\n\n"):
        flat = " ".join(part.split())
        is_command = flat.startswith(("nrgpt ", "torchrun "))
        found.append(f"```\n{flat}\n```" if is_command else cell(flat))
    return "\n\n".join(found)


def configuration_page() -> str:
    parts = [
        "# Every field of the configuration\n\nMade from the code. On the command line a field is "
        "`name=value`, with its group before it: `nrgpt train debug model.width=32 seed=1`. "
        "`[nrgpt]` and `[baselines]` say which blocks read a field.\n"
    ]
    groups: list[tuple[str, str, type]] = [
        ("The run", "", TrainConfig),
        ("The model", "model.", ModelConfig),
        ("The optimiser", "optimiser.", OptimiserConfig),
        ("The data", "data.", DataConfig),
        ("ListOps", "data.listops.", ListOpsConfig),
    ]
    for title, prefix, cls in groups:
        parts.append(f"\n## {title}\n\n{cell((cls.__doc__ or '').split(chr(10) * 2)[0])}\n")
        parts.append("\n| field | type | default | meaning |\n|---|---|---|---|\n")
        meanings, hints = docstrings(cls), typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(hints[field.name]):
                continue  # a group of its own
            kind = cell(type_name(hints[field.name]))
            default = "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
            if field.default_factory is not dataclasses.MISSING:
                default = f"`{field.default_factory()!r}`"
            meaning = cell(meanings.get(field.name, ""))
            parts.append(f"| `{prefix}{field.name}` | {kind} | {default} | {meaning} |\n")
    return "".join(parts)


def docstrings(cls: type) -> dict[str, str]:
    """The text under each field of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            found[field.target.id] = str(text.value.value)  # type: ignore[attr-defined]
    return found


def type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " ".join(f"`{value}`" for value in typing.get_args(hint))
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
