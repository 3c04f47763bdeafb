"""nrgpt presets."""

import dataclasses
import json
from typing import Annotated

from rich.table import Table
from typer import Argument

from ..train.config import TrainConfig
from ..train.distributed import device_named
from ..train.estimate import duration, estimated_seconds
from ..train.presets import PRESETS
from .common import app, screen
from .training import preset

FORMS = {"_paper": "p", "_released": "r"}


def groups() -> dict[str, dict[str, list[str]]]:
    """By task: the presets without a form, each with the forms that it has."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in sorted(PRESETS):
        form = next((form for form in FORMS if name.endswith(form)), "")
        base = name.removesuffix(form) if name.removesuffix(form) in PRESETS else name
        forms = found.setdefault(PRESETS[name]().data.task, {}).setdefault(base, [])
        if base != name:
            forms.append(FORMS[form])
    return found


def model_of(cfg: TrainConfig) -> str:
    return f"D{cfg.model.width} H{cfg.model.heads} T{cfg.model.steps}"


@app.command()
def presets(
    name: Annotated[str | None, Argument(help="Show all fields of this one.")] = None,
) -> None:
    """List the presets: width D, heads H, steps T and updates. Or all fields of one.

    PRESET is our recipe. Where p is listed, PRESET_paper is what the paper's text says; where r is,
    PRESET_released is what its authors' code does.
    """
    if name is not None:
        cfg = preset(name)
        make = PRESETS[name]
        screen.print((make.__doc__ or "").splitlines()[0], highlight=False)
        screen.print_json(json.dumps(dataclasses.asdict(cfg)))
        if device_named("auto") == "cpu":
            seconds = estimated_seconds(cfg)
            screen.print(f"on this machine, which has no GPU: about {duration(seconds)}")
        return
    for task, members in groups().items():
        table = Table(title=task, title_justify="left", pad_edge=False, box=None)
        table.add_column("preset", no_wrap=True)
        table.add_column("model", no_wrap=True)
        table.add_column("updates", justify="right", no_wrap=True)
        table.add_column("also", no_wrap=True)
        for base, forms in members.items():
            cfg = PRESETS[base]()
            row = (base, f"{cfg.model.block:<13} {model_of(cfg)}", f"{cfg.iterations:,}")
            table.add_row(*row, " ".join(forms))
        screen.print(table)
        screen.print()
    screen.print(
        "also: p PRESET_paper, r PRESET_released; nrgpt presets PRESET shows all of its fields",
        style="dim",
    )
