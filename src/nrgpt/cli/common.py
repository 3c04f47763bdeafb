"""What the commands share: the app, common options, and errors reported in one line."""

import errno
import functools
import inspect
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from .. import zoo
from ..files import check_ours, check_writable, missing_folders, refuse_links
from ..language_model import LanguageModel
from ..model.registry import load_plugin
from ..train.checkpoint import CheckpointError
from ..train.distributed import device_named
from ..train.faults import TrainingError
from ..train.runs import Run, load_run
from .outline import ABOUT, with_version

FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
WRONG_PATH = (
    errno.ENOENT, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR,
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTEMPTY, errno.ENXIO,
)  # fmt: skip
NO_MEMORY = re.compile("out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


def clear_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Report errors that the user can fix in one line, with an exit code. Others keep their
    traceback."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except (TrainingError, CheckpointError) as error:
            said, code = str(error), getattr(error, "code", 4)
        except (ValueError, ImportError) as error:
            if isinstance(error, ImportError) and "pip install" not in str(error):  # not ours
                raise
            said, code = str(error), 2
        except OSError as error:
            if error.errno is None:  # one of ours, with a complete message
                said, code = str(error), 2
            elif error.errno in FULL:
                said, code = f"the disk is full: {error}; free some space and continue", 4
            elif error.errno in WRONG_PATH:
                said, code = f"{error.filename}: {error.strerror}; choose another path", 2
            else:
                raise
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not NO_MEMORY.search(str(error)):
                raise
            first = str(error).splitlines()[0] if str(error) else ""
            said, code = f"out of memory: {first} (a smaller batch or model needs less)", 2
        except KeyboardInterrupt:
            said, code = "stopped at once", 130
        print(f"nrgpt: {said}", file=sys.stderr)
        raise typer.Exit(code)

    return wrapped


class Group(typer.core.TyperGroup):
    """Loads --plugin MODULE, anywhere on the command line, before it parses the rest."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest, words = [], iter(args)
        for word in words:
            name, has_value, value = word.partition("=")
            if name != "--plugin":
                rest.append(word)
                continue
            try:
                load_plugin(value if has_value else next(words))
            except StopIteration:
                raise typer.BadParameter("--plugin needs the name of a module") from None
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
        return super().parse_args(ctx, rest)

    def invoke(self, ctx: Any) -> Any:
        MADE.clear()
        try:
            return clear_errors(super().invoke)(ctx)
        except BaseException:
            for folder in reversed(MADE):
                with suppress(OSError):  # it is not empty: something came of it
                    folder.rmdir()
            raise


app = typer.Typer(
    help=ABOUT,
    cls=Group,
    # --step is the old name of --checkpoint.
    context_settings={
        "token_normalize_func": lambda name: "checkpoint" if name == "step" else name
    },
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.callback()(with_version)
screen = Console(markup=False, emoji=False)

FREE_FORM = {"ignore_unknown_options": True}  # passes on --model.width=64 as it is
Overrides = Annotated[
    list[str] | None,
    Argument(
        help="Fields to change: model.width=64 optimiser.lr=1e-3 ...", metavar="[FIELD=VALUE]..."
    ),
]


def folder_for_results(run: Path) -> Path:
    """Where results about a run go by default: its folder, or out/NAME for models of the zoo,
    whose folders belong to the package."""
    return Path("out") / run.name if zoo.is_inside(run) else run


RunFolder = Annotated[
    Path,
    Argument(
        help="A run folder, or zoo:NAME (see `nrgpt zoo`).", callback=zoo.resolve, metavar="RUN"
    ),
]


MADE: list[Path] = []
"""Folders that this command has made for its results; gone again if nothing comes of it."""


def folder_to_write(folder: Path) -> Path:
    """Create a folder for results, and find out now, not after the work, if that is possible."""
    MADE.extend(missing_folders(folder))
    refuse_links(folder)
    check_writable(folder)
    return folder


def file_to_write(path: Path) -> Path:
    """The same for a file that the user has named; the rest of its folder is not ours."""
    folder = path.absolute().parent
    MADE.extend(missing_folders(folder))
    check_writable(folder)
    return check_ours(path)


NewFolder = Annotated[Path, Option(help="Folder to create.")]
Steps = Annotated[int | None, Option(help="Inference steps; default as trained.")]
Checkpoint = Annotated[int | None, Option(help="Checkpoint, by its iteration; default the best.")]
Seed = Annotated[int, Option(min=0, max=2**63 - 1, help="Of random numbers.")]
Device = Annotated[str, Option(help="auto, cpu, cuda or mps.")]


def open_run(run: RunFolder, checkpoint: Checkpoint = None, device: Device = "auto") -> Run:
    """Load a run, and report the damaged checkpoints in its folder."""
    loaded = load_run(run, checkpoint, device=device_named(device))
    for fault in loaded.faults:
        print(f"skipped a damaged checkpoint: {fault}", file=sys.stderr)
    return loaded


def in_float64(model: LanguageModel) -> LanguageModel:
    """Apple's GPUs do not have it, so there the CPU takes over."""
    if model.tokens.device.type == "mps":
        screen.print("device = 'mps' has no float64: this is computed on the CPU")
        model = model.cpu()
    return model.double()


def with_options_of(make: Callable[..., Any]) -> Callable[[Callable[..., None]], Any]:
    """Give a command the options of ``make`` too; what ``make`` returns is its first argument."""
    shared = inspect.signature(make).parameters

    def decorate(command: Callable[..., None]) -> Any:
        @functools.wraps(command)
        def wrapped(**options: Any) -> None:
            made = make(**{name: options.pop(name) for name in shared})
            command(made, **options)

        _, *own = inspect.signature(command).parameters.values()
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *shared.values())]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def table_of(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
