"""The command line: nrgpt train | sweep | sample | evaluate | data | presets."""

import dataclasses
import errno
import functools
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .overrides import override
from .train.checkpoint import CheckpointError
from .train.faults import EXIT_CODES, TrainingError

if TYPE_CHECKING:
    from .runs import Run

app = typer.Typer(
    help="Energy-based GPTs: train them, watch them, use them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(help="Prepare and check datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
screen = Console()

FREE_FORM = {"ignore_unknown_options": True}  # so that --model.width=64 reaches us as it is
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Fields to change: model.width=64 optimiser.lr=1e-3 ...", metavar="[FIELD=VALUE]..."
    ),
]
Steps = Annotated[int | None, typer.Option(help="Inference steps, if not as trained.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
EXIT_TEXT = "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())


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
        except (ValueError, FileNotFoundError, FileExistsError) as error:
            said, code = str(error), 2
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            said, code = f"the disk is full: {error}; free some space and go on", 4
        except KeyboardInterrupt:
            said, code = "stopped at once", 130
        print(f"nrgpt: {said}", file=sys.stderr)
        raise typer.Exit(code)

    return wrapped


def open_run(folder: Path, step: int | None, device: str) -> "Run":
    """A run, and what was wrong in its folder said aloud."""
    from .runs import load_run
    from .train.distributed import device_named

    loaded = load_run(folder, step, device=device_named(device))
    for fault in loaded.faults:
        print(f"damaged checkpoint passed over: {fault}", file=sys.stderr)
    return loaded


def preset(name: str) -> Any:
    from .config import suggestion
    from .presets import PRESETS

    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}{suggestion(name, PRESETS)}")
    return PRESETS[name]()


def default_run(name: str, cfg: Any) -> Path:
    """runs/NAME for a preset as it is; with changes, a suffix that depends on them alone."""
    if cfg == preset(name):
        return Path("runs") / name
    text = json.dumps(dataclasses.asdict(cfg), sort_keys=True)
    return Path("runs") / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@app.command(context_settings=FREE_FORM, epilog=f"Exit codes: {EXIT_TEXT}.")
@clear_errors
def train(
    name: Annotated[str, typer.Argument(metavar="PRESET", help="See `nrgpt presets`.")],
    overrides: Overrides = None,
    to: Annotated[Path | None, typer.Option(help="Run folder; default below runs/.")] = None,
    packed: Annotated[
        bool, typer.Option(help="Many runs in one process: give fields several values.")
    ] = False,
) -> None:
    """Train a preset, or go on where it was stopped: type the same command again.

    On several GPUs: torchrun --nproc-per-node 8 -m nrgpt train PRESET

    Several seeds and learning rates together: nrgpt train PRESET --packed seeds=8 lr=1e-3,2e-3
    """
    from .train.loop import train as train_run

    if packed:
        several = [packed_field(assignment) for assignment in overrides or []]
        sweep(name, several, to or Path("runs") / f"{name}-packed", packed=1_000)
        return
    cfg = override(preset(name), overrides or [])
    folder = to or default_run(name, cfg)
    result = train_run(cfg, folder)
    screen.print_json(data=result)
    screen.print(f"everything is in {folder}")


def packed_field(assignment: str) -> str:
    """seeds=3 is short for seed=0,1,2; lr is short for optimiser.lr."""
    key, _, value = assignment.lstrip("-").partition("=")
    if key == "seeds":
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"seeds={value}: must be a whole number, at least 1")
        return "seed=" + ",".join(map(str, range(int(value))))
    return f"optimiser.lr={value}" if key == "lr" else assignment


@app.command()
@clear_errors
def presets() -> None:
    """List the presets, one line each: width D, heads H, steps T, and what they are.

    As PRESET: our recipe. PRESET_paper: the paper's text. PRESET_released: its authors' code.
    """
    from .presets import PRESETS

    for name, make in sorted(PRESETS.items()):
        cfg = make()
        model = f"{cfg.model.block} D{cfg.model.width} H{cfg.model.heads} T{cfg.model.steps}"
        what = (make.__doc__ or "").splitlines()[0]
        print(f"{name:<41} {model:<28} {cfg.iterations:>7,} iterations  {what}")


@app.command(context_settings=FREE_FORM)
@clear_errors
def sweep(
    name: Annotated[str, typer.Argument(metavar="PRESET")],
    overrides: Overrides = None,
    to: Annotated[Path | None, typer.Option(help="Folder; default sweeps/PRESET.")] = None,
    grid: Annotated[str | None, typer.Option(help="A named grid of the paper's.")] = None,
    trials: Annotated[int | None, typer.Option(help="Search with Optuna instead.")] = None,
    storage: Annotated[str | None, typer.Option(help="Optuna storage URL.")] = None,
    packed: Annotated[
        int | None, typer.Option(help="Train this many runs of one shape at a time, together.")
    ] = None,
) -> None:
    """Train a preset many times: all combinations of comma-separated values, or a search.

    nrgpt sweep shakespeare_nrgpt_ff2w model.width=64,128 seed=0,1,2

    nrgpt sweep debug optimiser.lr=log(1e-4,1e-2) --trials 20

    nrgpt sweep listops_nrgpt_ff2w --grid listops_widths seed=0,1,2 --packed 16
    """
    from .sweep import run_sweep

    run_sweep(
        name,
        preset(name),
        overrides or [],
        to or Path("sweeps") / name,
        grid=grid,
        trials=trials,
        storage=storage,
        packed=packed,
    )


@app.command()
@clear_errors
def sample(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    tokens: Annotated[int, typer.Option(help="New tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Only the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Only the likeliest with this sum.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: fewer repetitions.")] = 1.0,
    cache: Annotated[str, typer.Option(help="exact, frozen (less memory) or none.")] = "exact",
    seed: int = 0,
    steps: Steps = None,
    step: Annotated[int | None, typer.Option(help="Checkpoint; default the best.")] = None,
    device: Device = "auto",
) -> None:
    """Let a trained model continue a text; it is printed as it comes."""
    import torch

    from .generate import Sampling, stream

    loaded = open_run(run, step, device)
    is_listops = loaded.cfg.data.task == "listops"
    start = loaded.encode(prompt or ("<end>" if is_listops else "\n"))
    stop = loaded.encode("<end>") if is_listops else ()
    device_of = loaded.model.tokens.device
    text = list(start)
    written = ""

    def write(more: str) -> None:
        nonlocal written
        whole = more.rstrip("\ufffd")  # half of a character: wait for the rest
        sys.stdout.write(whole[len(written) :])
        sys.stdout.flush()
        written = whole

    for token in stream(
        loaded.model,
        [start],
        max_new_tokens=tokens,
        stop=stop,
        sampling=Sampling(repetition_penalty, temperature, top_k, top_p),
        generator=torch.Generator(device_of).manual_seed(seed),
        steps=steps,
        cache=cache,  # type: ignore[arg-type]
    ):
        text += token.values()
        write(loaded.decode(text))
    write(loaded.decode(text) + "\n")


@app.command()
@clear_errors
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    split: str = "val",
    steps: Steps = None,
    stride: Annotated[
        int | None, typer.Option(help="1 gives every token its full context.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Checkpoint; default the best.")] = None,
    device: Device = "auto",
) -> None:
    """Loss on every token of a split and, for ListOps, the accuracy on all tests."""
    from .evaluate.listops import listops_accuracy
    from .evaluate.loss import split_loss

    loaded = open_run(run, step, device)
    dataset = loaded.dataset()
    loss = split_loss(loaded.model, dataset.tokens(split), stride=stride, steps=steps)
    screen.print(
        f"{split} loss {loss.loss:.4f} nats over {loss.tokens:,} tokens, each with at least "
        f"{loss.least_context} before it (checkpoint at step {loaded.step})"
    )
    if loaded.cfg.data.task == "listops":
        from .data.listops import read_tests

        tests = read_tests(dataset.folder)
        result = listops_accuracy(
            loaded.model, tests, dataset.tokenizer, steps=steps, progress=True
        )
        screen.print(result.table())


@data_app.command("listops", context_settings=FREE_FORM)
@clear_errors
def data_listops(
    to: Annotated[Path, typer.Option(help="Folder to make.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Fields to change: modulus=7 ...")
    ] = None,
    released: Annotated[bool, typer.Option(help="The released data, not the paper's.")] = False,
) -> None:
    """Draw ListOps expressions. (`nrgpt train` does so by itself; this is for other uses.)"""
    from .data.listops import PAPER, RELEASED, prepare_listops

    cfg = override(RELEASED if released else PAPER, overrides or [])
    prepare_listops(cfg, to)
    screen.print(f"{cfg.train:,} + {cfg.validation:,} + {cfg.test:,} expressions are in {to}")


@data_app.command("shakespeare")
@clear_errors
def data_shakespeare(to: Path, source: Annotated[Path | None, typer.Option()] = None) -> None:
    """Prepare the Shakespeare characters (found, or downloaded), or any text with --source."""
    from .data.shakespeare import prepare_shakespeare

    prepare_shakespeare(to, source=source)


@data_app.command("text")
@clear_errors
def data_text(
    files: Annotated[list[Path], typer.Argument(help=".txt, .txt.xz, .jsonl or .parquet files.")],
    to: Annotated[Path, typer.Option(help="Folder to make.")],
    workers: int = 2,
    separator: Annotated[str, typer.Option(help="Line that ends a document.")] = "<|endoftext|>",
    validation: Annotated[float, typer.Option(help="Share of documents held out.")] = 0.0005,
    field: Annotated[str, typer.Option(help="Where .jsonl and .parquet have the text.")] = "text",
) -> None:
    """Tokenize local files with GPT-2's byte pairs into memory-mapped shards."""
    from .data.text import prepare_text
    from .data.tokenizer import GPT2Tokenizer

    prepare_text(
        files,
        to,
        tokenizer=GPT2Tokenizer(),
        separator=separator,
        field=field,
        validation=validation,
        workers=workers,
    )


@data_app.command("hub")
@clear_errors
def data_hub(
    to: Annotated[Path, typer.Option(help="Folder to make.")],
    name: Annotated[str, typer.Argument()] = "Skylion007/openwebtext",
    split: Annotated[str, typer.Option(help="The hub's split to take.")] = "train",
    field: Annotated[str, typer.Option(help="The column that has the text.")] = "text",
    workers: int = 2,
    validation: Annotated[float, typer.Option(help="Share of documents held out.")] = 0.0005,
) -> None:
    """Stream and tokenize a dataset of the Hugging Face hub."""
    from .data.text import prepare_hub
    from .data.tokenizer import GPT2Tokenizer

    prepare_hub(
        name,
        to,
        split=split,
        field=field,
        tokenizer=GPT2Tokenizer(),
        validation=validation,
        workers=workers,
    )


@data_app.command("verify")
@clear_errors
def data_verify(folder: Path) -> None:
    """Check every byte of a prepared dataset."""
    from .data.shards import Dataset

    dataset = Dataset.open(folder, verify=True)
    for split in dataset.manifest["splits"]:
        screen.print(f"{split}: {len(dataset.tokens(split)):,} tokens, all in order")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
