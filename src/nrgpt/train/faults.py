"""Exit codes, signals, and a lock against a second process in the same folder."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

DIVERGED = 3
INTERRUPTED = 75
EXIT_CODES = {
    0: "finished",
    1: "an unexpected error",
    2: "a wrong argument, configuration or dataset",
    DIVERGED: "the loss stayed not finite after all retries",
    4: "a checkpoint could not be written",
    5: "another process is using the run folder",
    INTERRUPTED: "stopped by a signal after saving: run the same command again to resume",
}


class TrainingError(RuntimeError):
    """A run cannot go on; ``code`` is the exit code of the process."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class Interrupt:
    """SIGTERM and SIGINT ask a run to finish its update, save and stop. A second SIGINT ends it at
    once.

    Interrupts may be nested. The outer one learns what the inner one received, so that after a run
    that was about to finish anyway no other run is started."""

    def __init__(self) -> None:
        self.received: str | None = None
        self.all_is_saved = False
        """There is nothing to finish: the next signal ends the run at once."""

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if self.all_is_saved:
            self.heed()
        if number == signal.SIGINT:
            # Not print: the signal may have come in the middle of one.
            os.write(2, b"\nsaving ... (another Ctrl-C ends this at once)\n")
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextmanager
    def watching(self) -> Iterator["Interrupt"]:
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self.handle) for number in signals}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
                around = getattr(handler, "__self__", None)
                if isinstance(around, Interrupt):
                    around.received = around.received or self.received

    def heed(self) -> None:
        """Stop if a signal was received. To be called between runs, when everything is saved."""
        if self.received:
            message = f"{self.received}: all is saved; run the same command to resume"
            raise TrainingError(message, code=INTERRUPTED)


@contextmanager
def only_process(run: Path) -> Iterator[None]:
    """Lock RUN/lock. The system frees it when this process ends, in whatever way."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise TrainingError(
                f"{run} is in use by process {holder}; wait for it, stop it, or choose another "
                "folder with --to",
                code=5,
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
