"""Run the code of a page and put what it prints, returns and draws under each block.

A ```python block goes on where the one before has ended; the value of its last line is shown, and a
matplotlib figure becomes a picture. A ```sh block holds `nrgpt ...` commands. A page may say what
tests replace, so that they are quick:

    <!-- in tests: iterations=400 => iterations=4 -->
"""

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
QUICKER = re.compile(r"^<!-- in tests: (.+?) => (.+?) -->$", re.MULTILINE)
LONGEST = 40
"""Lines of output that are shown."""


def executed(page: Path, work: Path, *, quick: bool = False) -> tuple[str, dict[str, bytes]]:
    """The page with its outputs, and its pictures by name. It runs in the folder ``work``."""
    text, about = page.read_text(encoding="utf-8"), {"__name__": page.stem}
    pictures: dict[str, bytes] = {}
    replaced = QUICKER.findall(text) if quick else []
    text = QUICKER.sub("", text)
    work.mkdir(parents=True, exist_ok=True)
    parts, end = [], 0
    with contextlib.chdir(work):
        for block in BLOCK.finditer(text):
            code = block[2]
            for old, new in replaced:
                code = code.replace(old, new)
            try:
                if block[1] == "sh":
                    said, figure = shell(code, quick), None
                else:
                    said, figure = python(code, about)
            except Exception as error:
                error.add_note(f"in {page}:\n{code}")
                raise
            parts += [text[end : block.end()], shown(said)]
            if figure is not None:
                name = f"{page.stem}-{len(pictures) + 1}.svg"
                pictures[name] = figure
                kind = "{ .wide }" if is_wide(figure) else ""
                parts.append(f"\n![What the code above draws]({name}){kind}\n")
            end = block.end()
    return "".join([*parts, text[end:]]), pictures


def is_wide(figure: bytes) -> bool:
    """Whether nobody could read it if it were shrunk to the width of a column."""
    width, height = (
        re.search(rb' %s="([\d.]+)pt"' % side, figure) for side in (b"width", b"height")
    )
    assert width is not None
    assert height is not None
    return float(width[1]) > 2.5 * float(height[1])


def shown(said: str) -> str:
    lines = [line.rstrip()[:120] for line in said.rstrip().splitlines()]
    if len(lines) > LONGEST:
        lines = [*lines[: LONGEST - 6], f"... {len(lines) - LONGEST + 1} lines ...", *lines[-5:]]
    return "\n```{ .text .output }\n" + "\n".join(lines) + "\n```\n" if lines else ""


def python(code: str, about: dict[str, Any]) -> tuple[str, bytes | None]:
    tree, figure = ast.parse(code), None
    value: Any = None
    last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    if last is not None:
        tree.body.pop()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(tree, "<page>", "exec"), about)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<page>", "eval"), about)
    if hasattr(value, "savefig"):
        buffer = io.BytesIO()
        value.savefig(buffer, format="svg")
        figure = buffer.getvalue()
    elif value is not None:
        out.write(f"{value if isinstance(value, str) else repr(value)}\n")
    return out.getvalue(), figure


def shell(code: str, quick: bool) -> str:
    """What the commands print. Each is a process of its own, or a call if that is too slow."""
    said = []
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        if words:
            assert words[0] == "nrgpt", f"only nrgpt may be called, not {line!r}"
            said.append(called(words[1:]) if quick else run(words[1:]))
    return "".join(said)


def run(words: list[str]) -> str:
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "nrgpt", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1_800, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"nrgpt {words}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def called(words: list[str]) -> str:
    from typer.testing import CliRunner

    from nrgpt.cli import app

    done = CliRunner().invoke(app, words)
    if done.exit_code:
        raise RuntimeError(f"nrgpt {words}: exit code {done.exit_code}\n{done.output}")
    return str(done.stdout)
