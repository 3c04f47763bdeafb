"""What the commands share: the app, options, and errors said in one line."""

import errno
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .. import zoo
from ..model.registry import load_plugin
from ..train.checkpoint import CheckpointError
from ..train.faults import TrainingError

if TYPE_CHECKING:
    from ..train.runs import Run


class Plugins(typer.core.TyperGroup):
    """--plugin MODULE, anywhere on the line: loaded before anything else is looked at."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest, waiting = [], list(args)
        while waiting:
            word = waiting.pop(0)
            name, has_value, value = word.partition("=")
            if name != "--plugin":
                rest.append(word)
                continue
            if not has_value and not waiting:
                raise typer.BadParameter("--plugin needs the name of a module")
            try:
                load_plugin(value if has_value else waiting.pop(0))
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
        return super().parse_args(ctx, rest)


app = typer.Typer(
    help="Energy-based GPTs: train them, watch them, use them. With energies of your own, every "
    "command takes [bold]--plugin MODULE[/bold], a module that registers them.",
    cls=Plugins,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(help="Prepare and check datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
screen = Console()

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WRONG_PATH = (
    errno.ENOENT, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR,
)  # fmt: skip

FREE_FORM = {"ignore_unknown_options": True}  # so that --model.width=64 reaches us as it is
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Fields to change: model.width=64 optimiser.lr=1e-3 ...", metavar="[FIELD=VALUE]..."
    ),
]


def run_folder(given: str) -> Path:
    """A path, or the folder that zoo:NAME stands for."""
    if not given.startswith(zoo.PREFIX):
        return Path(given)
    try:
        return zoo.folder(given.removeprefix(zoo.PREFIX))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def folder_for_results(run: Path) -> Path:
    """Where what is found about a run is written by default: into its folder, but for those of the
    zoo, which are the package's."""
    return Path("out") / run.name if zoo.is_inside(run) else run


RunFolder = Annotated[
    Path,
    typer.Argument(
        help="A run folder, or zoo:NAME (see `nrgpt zoo`).", parser=run_folder, metavar="RUN"
    ),
]
Steps = Annotated[int | None, typer.Option(help="Inference steps, if not as trained.")]
Checkpoint = Annotated[int | None, typer.Option(help="Checkpoint; default the best.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """What a user can mend is said in one line, with an exit code; the rest keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
            return
        except TrainingError as error:
            said, code = str(error), error.code
        except CheckpointError as error:
            said, code = str(error), 4
        except ValueError as error:
            said, code = str(error), 2
        except OSError as error:
            if error.errno is None:  # one of ours, which says all
                said, code = str(error), 2
            elif error.errno in FULL:
                said, code = f"the disk is full: {error}; free some space and go on", 4
            elif error.errno in WRONG_PATH:
                said, code = f"{error.filename}: {error.strerror}; choose another path", 2
            else:
                raise
        except KeyboardInterrupt:
            said, code = "stopped at once", 130
        print(f"nrgpt: {said}", file=sys.stderr)
        raise typer.Exit(code)

    return wrapped


def open_run(folder: Path, step: int | None, device: str) -> "Run":
    """A run, and what was wrong in its folder said aloud."""
    from ..train.distributed import device_named
    from ..train.runs import load_run

    loaded = load_run(folder, step, device=device_named(device))
    for fault in loaded.faults:
        print(f"damaged checkpoint passed over: {fault}", file=sys.stderr)
    return loaded
