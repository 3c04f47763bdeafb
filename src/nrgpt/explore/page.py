"""The explorer as one file: no server, no other file, no network."""

import functools
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

SCRIPTS = (
    "arrays.js", "engine.js", "landscape.js", "draw.js", "sources.js", "views.js", "terrain.js",
    "app.js", "controls.js",
)  # fmt: skip

TITLE = "<title>nrgpt explorer</title>"
"""By which a page is known to be ours."""


def page(models: Sequence[dict[str, Any]], *, connect: str = "'none'") -> str:
    """The page of these models (see ``nrgpt.explore.models``), the first of which it begins with.
    ``connect`` is whom it may talk to, as a Content-Security-Policy says it."""
    data = json.dumps({"models": list(models)}, separators=(",", ":"), allow_nan=False)
    # Whatever a text holds, no tag can begin or end inside <script>.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    before, between, after = template().replace("CONNECT", connect).split("\0")
    return before + data + between + scripts() + after


def refuse_other_pages(path: Path) -> None:
    """A page of somebody else would be overwritten."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        if TITLE not in file.read(4_096):
            raise FileExistsError(f"{path} exists and is no page of nrgpt; choose another --to")


@functools.cache
def template() -> str:
    """The page with its style, and with gaps for data and scripts."""
    empty = static("index.html").replace("STYLE", static("style.css"), 1)
    return empty.replace(">DATA<", ">\0<", 1).replace(">SCRIPT<", ">\0<", 1)


@functools.cache
def scripts() -> str:
    return "\n".join(static(name) for name in SCRIPTS)


def static(name: str) -> str:
    return resources.files(__package__).joinpath("static", name).read_text(encoding="utf-8")
