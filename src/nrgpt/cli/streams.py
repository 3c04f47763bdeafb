"""Standard output that may close while we go on."""

import errno
import os
from collections.abc import Callable
from typing import Any

GONE = (errno.EPIPE, errno.EIO)


class Lasting:
    """A terminal or pipe that may close while we go on: a training outlives ``2>&1 | head``. What
    its encoding does not have is written as an escape."""

    def __init__(self, stream: Any):
        self.stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self.attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self.attempt(self.stream.flush)

    def attempt(self, do: Callable[..., Any], *arguments: Any) -> None:
        try:
            do(*arguments)
        except OSError as error:
            if error.errno not in GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
