"""Exit codes, signals, and the folder of a run: ours alone, and clean if nothing came of it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ..files import InUse, check_ours, locked, make_folder, missing_folders, unfinished_of_dead

DIVERGED = 3
LOST = 6
INTERRUPTED = 75
EXIT_CODES = {
    0: "finished",
    1: "an unexpected error",
    2: "a wrong argument, configuration or dataset",
    DIVERGED: "the loss stayed not finite after all retries",
    4: "a checkpoint could not be written",
    5: "another process is using the run folder",
    LOST: "another process of the run was lost or did not answer in time",
    INTERRUPTED: "stopped by a signal after saving: run the same command again to resume",
}


class TrainingError(RuntimeError):
    """A run cannot go on; ``code`` is the exit code of the process."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


SIGNALS = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGBREAK")
    if hasattr(signal, name)
]
"""What asks a run to stop: a terminal or ssh that closes sends SIGHUP, Slurm SIGUSR1 or SIGTERM."""


class Interrupt:
    """One of SIGNALS asks a run to finish its update, save and stop. A second SIGINT ends it at
    once. Under nohup, SIGHUP stays ignored.

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
        before = {}
        for number in SIGNALS:
            is_ignored = signal.getsignal(number) == signal.SIG_IGN and number != signal.SIGINT
            if not is_ignored:
                before[number] = signal.signal(number, self.handle)
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


LOCK = "lock"
NOT_YET_A_RUN = {LOCK, "checkpoints"}
"""What a run that was killed before it wrote its configuration may leave in its folder."""


@contextmanager
def only_process(run: Path) -> Iterator[None]:
    """Lock RUN/lock. A folder that holds something else than a run is refused, and if no run comes
    of this, lock and folder are gone again."""
    if not str(run).isprintable():  # safetensors opens no file whose name is not UTF-8
        raise ValueError(f"{str(run)!r} cannot be the name of a run; choose another with --to")
    made = missing_folders(run)
    try:
        make_folder(run)
        refuse_other_folders(run)
        with locked(run / LOCK, keep=True):
            for left in unfinished_of_dead(run):
                left.unlink()
            for name in ("checkpoints", "tensorboard"):
                if (run / name).is_symlink():
                    make_folder(run / name)  # raises an error
            for name in OUTPUTS:
                check_ours(run / name)
            try:
                yield
            finally:
                if [path.name for path in run.iterdir()] == [LOCK]:
                    (run / LOCK).unlink()
    except InUse as error:
        raise TrainingError(
            f"{run} is in use by process {error.holder}; wait for it, stop it, or choose another "
            "folder with --to",
            code=5,
        ) from None
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # it is not empty
                folder.rmdir()


OUTPUTS = (
    "config.json", "environment.json", "tokenizer.json", "metrics.jsonl", "result.json",
    "samples.txt", "losses.png", "gpt2.tiktoken",
)  # fmt: skip


def refuse_other_folders(run: Path) -> None:
    """Files of somebody else may have the names of ours, and would be overwritten."""
    if (run / "config.json").exists():
        return
    names = sorted(p.name for p in run.iterdir() if p.name not in NOT_YET_A_RUN)
    names = [name for name in names if not name.startswith(tuple(f".{x}." for x in OUTPUTS))]
    if names:
        listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise ValueError(
            f"{run} is not a run (there is no config.json) and is not empty ({listed}); choose a "
            "new or an empty folder with --to"
        )
