"""The command line. What it says at once (its version, the list of commands) loads no torch; the
commands themselves are in commands.py."""

import sys
from typing import Any

from .. import __version__
from .streams import Lasting

__all__ = ["app", "main"]


def main() -> None:
    streams: Any = Lasting(sys.stdout), Lasting(sys.stderr)
    sys.stdout, sys.stderr = streams
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(f"nrgpt {__version__}")
    elif arguments in ([], ["--help"]):
        from .outline import outline

        outline(["--help"])
    else:
        from .commands import app

        app()


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .commands import app

    return app
