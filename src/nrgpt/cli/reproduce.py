"""nrgpt reproduce: the paper's figures and tables."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import FREE_FORM, Overrides, app, clear_errors, screen

reproduce_app = typer.Typer(
    help="Train what is missing and make the paper's figures and tables; stop it whenever, the "
    "same command goes on.",
    no_args_is_help=True,
)
app.add_typer(reproduce_app, name="reproduce")

Quick = Annotated[bool, typer.Option("--quick", help="Tiny: only shows that everything works.")]
PlotsOnly = Annotated[
    bool, typer.Option("--plots-only", help="No training: draw from the records that are there.")
]
To = Annotated[
    Path | None,
    typer.Option(help="Records and figures; default experiments/NAME (quick: out/NAME-quick)."),
]
Processes = Annotated[int, typer.Option(min=1, help="Packs of runs at a time, on one GPU.")]
Seeds = Annotated[int | None, typer.Option(min=1, help="Seeds of each configuration.")]
Only = Annotated[
    str | None, typer.Option(help="Only runs with one of these in their names: mod10,w64 ...")
]
Forget = Annotated[
    bool, typer.Option("--forget", help="Delete the checkpoints of runs that are on record.")
]
Judge = Annotated[
    str, typer.Option(help="Causal LM for the perplexity of texts, name or folder; or none.")
]
Recipe = Annotated[str, typer.Option(help="ours, or paper: as the paper's text says.")]


def folder(name: str, to: Path | None, quick: bool) -> Path:
    """Runs that prove nothing stay away from experiments/, and use one thread: of tiny models,
    threads only wait for each other."""
    if quick:
        import torch

        torch.set_num_threads(1)
    return to or (Path("out") / f"{name}-quick" if quick else Path("experiments") / name)


def chosen(cases: list[Any], only: str | None, overrides: list[str] | None) -> list[Any]:
    """Cases by parts of their names, with fields changed in all of them."""
    found = [c for c in cases if only is None or any(part in c.name for part in only.split(","))]
    if not found:
        names = ", ".join(case.name for case in cases[:5])
        raise ValueError(f"only = {only!r}: no run is called so; there are {names}, ...")
    return [case.changed(overrides or []) for case in found]


def tell(files: list[Path]) -> None:
    for file in files:
        screen.print(str(file), soft_wrap=True)


@reproduce_app.command(context_settings=FREE_FORM)
@clear_errors
def listops(
    overrides: Overrides = None,
    recipe: Recipe = "ours",
    seeds: Seeds = None,
    only: Only = None,
    quick: Quick = False,
    plots_only: PlotsOnly = False,
    to: To = None,
    processes: Processes = 1,
    forget: Forget = False,
) -> None:
    """Transitions: accuracy and losses against parameters, fits, where 80 % are reached.

    16 widths (15 in our recipe), FF1 (hidden 4 D and 8 D), FF2W and RGPT-parallel, modulo 10 and
    20, answers with steps and direct, 3 seeds.
    """
    from ..reproduce import listops

    cases = chosen(listops.cases(recipe, seeds or (2 if quick else 3), quick), only, overrides)
    where = folder("listops", to, quick)
    options = {"processes": processes, "plots_only": plots_only, "forget": forget}
    tell(listops.reproduce(cases, where, **options))


@reproduce_app.command(context_settings=FREE_FORM)
@clear_errors
def energy(
    overrides: Overrides = None,
    recipe: Recipe = "ours",
    seeds: Seeds = None,
    only: Only = None,
    quick: Quick = False,
    plots_only: PlotsOnly = False,
    to: To = None,
    processes: Processes = 1,
    forget: Forget = False,
) -> None:
    """Energies of 64 tokens, and ||x||: over 30 steps with eta = 1, over 100 with a free eta."""
    from ..reproduce import energy

    cases = chosen(energy.cases(recipe, seeds or 1, quick), only, overrides)
    where = folder("energy", to, quick)
    options = {"processes": processes, "plots_only": plots_only, "forget": forget}
    tell(energy.reproduce(cases, where, **options))


@reproduce_app.command(context_settings=FREE_FORM)
@clear_errors
def shakespeare(
    overrides: Overrides = None,
    recipe: Recipe = "ours",
    seeds: Seeds = None,
    only: Only = None,
    judge: Judge = "gpt2",
    quick: Quick = False,
    plots_only: PlotsOnly = False,
    to: To = None,
    processes: Processes = 1,
    forget: Forget = False,
) -> None:
    """Losses against parameters, best configurations with text metrics, overfitting, our recipe.

    Parts: scaling-, long- (the check for overfitting), table- (the paper's recipe) or ours_small-
    and ours_wide- (ours); --only scaling takes one of them.
    """
    from ..reproduce import shakespeare

    cases = shakespeare.cases(recipe, seeds or (1 if quick else 3), quick)
    where = folder("shakespeare", to, quick)
    options: dict[str, Any] = {"judge": None if judge == "none" or quick else judge, "quick": quick}
    options |= {"processes": processes, "plots_only": plots_only, "forget": forget}
    tell(shakespeare.reproduce(chosen(cases, only, overrides), where, **options))


@reproduce_app.command()
@clear_errors
def flops(quick: Quick = False, to: To = None) -> None:
    """The appendix on FLOPs, by formula and by PyTorch's counter: seconds, quick or not."""
    from ..reproduce import flops

    tell(flops.reproduce(folder("flops", to, quick)))


@reproduce_app.command(context_settings=FREE_FORM)
@clear_errors
def text(
    overrides: Overrides = None,
    data: Annotated[
        Path | None, typer.Option(help="A prepared dataset, from `nrgpt data text`.")
    ] = None,
    held_out: Annotated[Path | None, typer.Option(help="Another, to evaluate on only.")] = None,
    mmlu: Annotated[
        Path | None, typer.Option(help="MMLU's csv files, to ask 50 questions a subject.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that each model sees.")] = 100_000_000,
    throughput: Annotated[
        float | None, typer.Option(help="Tokens/s of one GPU, to estimate the full run by.")
    ] = None,
    recipe: Recipe = "ours",
    seeds: Seeds = None,
    only: Only = None,
    judge: Judge = "gpt2",
    quick: Quick = False,
    plots_only: PlotsOnly = False,
    to: To = None,
    processes: Processes = 1,
    forget: Forget = False,
) -> None:
    """The models of the OpenWebText tables: losses against tokens, FLOPs and seconds, and texts.

    --quick without --data takes Shakespeare's characters.
    """
    from ..reproduce import text
    from ..train.config import DataConfig
    from ..train.data import prepare_dataset

    where = folder("text", to, quick)
    found = []
    if not plots_only:
        if data is None and not quick:
            raise ValueError("--data: name a dataset that `nrgpt data text` or `data hub` prepared")
        data = data or prepare_dataset(DataConfig(task="shakespeare"))
        tokens = 3_840 if quick else tokens
        found = chosen(text.cases(data, recipe, seeds or 1, tokens, quick), only, overrides)
    options: dict[str, Any] = {
        "held_out": held_out,
        "mmlu": mmlu,
        "judge": None if judge == "none" or quick else judge,
        "throughput": throughput,
        "quick": quick,
    }
    options |= {"processes": processes, "plots_only": plots_only, "forget": forget}
    tell(text.reproduce(found, where, **options))


@reproduce_app.command(hidden=True)
@clear_errors
def runs(folders: list[Path]) -> None:
    """Train the runs whose configurations are in these folders, as one pack: this is how
    `nrgpt reproduce --processes N` starts its processes."""
    from ..reproduce.training import train_pack
    from ..train.runs import read_config

    train_pack([read_config(run / "config.json") for run in folders], folders)
