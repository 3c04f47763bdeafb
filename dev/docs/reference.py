"""Pages made from the code: every command with its options, every field of the configuration."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from nrgpt.cli import app
from nrgpt.cli.fields import described
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
        title, _, command = flat.rpartition(": ")
        is_command = command.startswith(("nrgpt ", "torchrun "))
        code = f"```\n{command}\n```"
        found.append((f"{cell(title)}:\n\n{code}" if title else code) if is_command else cell(flat))
    return "\n\n".join(found)


def configuration_page() -> str:
    parts = [
        "# Every field of the configuration\n\nMade from the code. On the command line a field is "
        "`name=value`, with its group before it: `nrgpt train debug model.width=32 seed=1`. "
        "`[nrgpt]` and `[baselines]` say which blocks read a field.\n"
    ]
    groups = {
        "": ("The run", TrainConfig),
        "model.": ("The model", ModelConfig),
        "optimiser.": ("The optimiser", OptimiserConfig),
        "data.": ("The data", DataConfig),
        "data.listops.": ("ListOps", ListOpsConfig),
    }
    rows = described()
    for prefix, (title, cls) in groups.items():
        about = (cls.__doc__ or "").split("\n\n")[0]
        about = "" if about.startswith(f"{cls.__name__}(") else cell(about)  # Python's own
        parts.append(f"\n## {title}\n\n{about}\n")
        parts.append("\n| field | type | default | meaning |\n|---|---|---|---|\n")
        for name, kind, default, meaning in rows:
            if name.rpartition(".")[0] == prefix.rstrip("."):
                told = (f"`{name}`", cell(kind), f"`{default}`", cell(meaning))
                parts.append(f"| {' | '.join(told)} |\n")
    return "".join(parts)
