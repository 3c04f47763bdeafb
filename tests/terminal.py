"""A command in a terminal of 80 columns, as a user sees it."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from typing import NamedTuple

from .processes import patience, started
from .runs import command

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Seen(NamedTuple):
    code: int
    text: str
    """Without escape sequences."""
    answered: float
    """Seconds from Ctrl-C to the next line that was shown."""


def in_terminal(*arguments: str, ctrl_c_after: str | None = None, answer: str = "") -> Seen:
    """Run `nrgpt ...`; press Ctrl-C when ``ctrl_c_after`` appears, and wait for ``answer``."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    ends = {"stdin": slave, "stdout": slave, "stderr": slave}
    with started(command(*arguments), env=environment, **ends) as process:
        os.close(slave)
        try:
            said, answered = listen(process, master, ctrl_c_after, answer)
        finally:
            os.close(master)
        return Seen(process.wait(patience()), said, answered)


def listen(process, master, ctrl_c_after, answer):
    """Until it ends."""
    said, pressed, answered = "", 0.0, -1.0
    end = time.monotonic() + 2 * patience()
    while time.monotonic() < end:
        ready, _, _ = select.select([master], [], [], 0.2)
        if not ready:
            if process.poll() is not None:
                break
            continue
        try:
            read = os.read(master, 1 << 16)
        except OSError:  # the other end is closed
            break
        said += ESCAPES.sub("", read.decode("utf-8", "replace"))
        if ctrl_c_after and not pressed and re.search(ctrl_c_after, said):
            process.send_signal(signal.SIGINT)
            pressed = time.monotonic()
        elif pressed and answered < 0 and answer in said:
            answered = time.monotonic() - pressed
    return said, answered
