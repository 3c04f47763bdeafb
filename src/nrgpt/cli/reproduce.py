"""nrgpt reproduce: the paper's figures and tables."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer import Option

from ..data.shards import Dataset
from ..reproduce import energy as energy_study
from ..reproduce import flops as flops_study
from ..reproduce import listops as listops_study
from ..reproduce import shakespeare as shakespeare_study
from ..reproduce import text as text_study
from ..reproduce import variants as variants_study
from ..reproduce.training import train_pack
from ..train.config import DataConfig
from ..train.data import located, prepare_dataset
from ..train.runs import read_config
from .common import FREE_FORM, Overrides, app, screen, with_options_of

reproduce_app = typer.Typer(
    help="Train the missing runs and make the paper's figures and tables. Stop it at any time; the "
    "same command continues.",
    no_args_is_help=True,
)
app.add_typer(reproduce_app, name="reproduce")

QUICK_TOKENS = 3_840
"""Training tokens of text, in tiny."""

Judge = Annotated[
    str, Option(help="Causal LM, name or folder, for the perplexity of texts; or none.")
]
Quick = Annotated[bool, Option("--quick", help="Tiny models, only to show that everything works.")]
To = Annotated[
    Path | None,
    Option(
        help="Folder for records and figures; default experiments/NAME (quick: out/NAME-quick)."
    ),
]


@dataclasses.dataclass
class Shared:
    """The options of every command that trains."""

    overrides: Overrides = None
    recipe: Annotated[str, Option(help="ours, or paper: as in the paper's text.")] = "ours"
    seeds: Annotated[int | None, Option(min=1, help="Seeds for each configuration.")] = None
    only: Annotated[
        str | None, Option(help="Only runs with one of these in their names: mod10,w64 ...")
    ] = None
    quick: Quick = False
    plots_only: Annotated[
        bool, Option("--plots-only", help="Do not train; draw from existing records.")
    ] = False
    to: To = None
    processes: Annotated[
        int, Option(min=1, help="Packs of runs to train at a time, on one GPU.")
    ] = 1
    forget: Annotated[bool, Option("--forget", help="Delete the checkpoints of recorded runs.")] = (
        False
    )

    def carry_out(self, study: Any, cases: list[Any], **options: Any) -> None:
        """Run a study, a module of nrgpt.reproduce, on the cases that --only selects, with the
        overrides applied."""
        parts = [""] if self.only is None else self.only.split(",")
        found = [case for case in cases if any(part in case.name for part in parts)]
        if cases and not found:
            names = ", ".join(case.name for case in cases[:5])
            raise ValueError(
                f"only = {self.only!r}: no run has such a name; there are {names}, ..."
            )
        found = [case.changed(self.overrides or []) for case in found]
        where = folder(study.__name__.rpartition(".")[2], self.to, self.quick)
        options |= {name: getattr(self, name) for name in ("processes", "plots_only", "forget")}
        try:
            show(study.reproduce(found, where, **options))
        except KeyError as error:
            if not self.plots_only:
                raise
            raise ValueError(f"{where}: a row of its results has no {error}") from error

    def with_texts(self, judge: str) -> dict[str, Any]:
        return {"judge": None if judge == "none" or self.quick else judge, "quick": self.quick}


def folder(name: str, to: Path | None, quick: bool) -> Path:
    """Quick runs prove nothing, so they stay out of experiments/. They use one thread: for tiny
    models, several only wait for each other."""
    if quick:
        torch.set_num_threads(1)
    return to or (Path("out") / f"{name}-quick" if quick else Path("experiments") / name)


def show(files: list[Path]) -> None:
    for file in files:
        screen.print(str(file), soft_wrap=True)


@reproduce_app.command(context_settings=FREE_FORM)
@with_options_of(Shared)
def listops(shared: Shared) -> None:
    """Transitions: accuracy and losses against parameters, fits, and where 80 % is reached.

    16 widths (15 in our recipe), FF1 (hidden 4 D and 8 D), FF2W and RGPT-parallel, modulo 10 and
    20, answers with steps and direct, 3 seeds.
    """
    seeds = shared.seeds or (2 if shared.quick else 3)
    cases = listops_study.cases(shared.recipe, seeds, shared.quick)
    shared.carry_out(listops_study, cases)


@reproduce_app.command(context_settings=FREE_FORM)
@with_options_of(Shared)
def energy(shared: Shared) -> None:
    """Energies and ||x|| of 64 tokens: over 30 steps with eta = 1, over 100 with a free eta."""
    cases = energy_study.cases(shared.recipe, shared.seeds or 1, shared.quick)
    shared.carry_out(energy_study, cases)


@reproduce_app.command(context_settings=FREE_FORM)
@with_options_of(Shared)
def shakespeare(shared: Shared, judge: Judge = "gpt2") -> None:
    """Losses against parameters, best configurations with text metrics, overfitting, our recipe.

    Parts: scaling-, long- (the check for overfitting), table- (the paper's recipe) or ours_small-
    and ours_wide- (ours). --only scaling selects one of them.
    """
    seeds = shared.seeds or (1 if shared.quick else 3)
    cases = shakespeare_study.cases(shared.recipe, seeds, shared.quick)
    shared.carry_out(shakespeare_study, cases, **shared.with_texts(judge))


@reproduce_app.command()
def flops(quick: Quick = False, to: To = None) -> None:
    """The appendix on FLOPs, by formula and by PyTorch's counter. Takes seconds, quick or not."""
    show(flops_study.reproduce(folder("flops", to, quick)))


@reproduce_app.command(context_settings=FREE_FORM)
@with_options_of(Shared)
def text(
    shared: Shared,
    data: Annotated[Path | None, Option(help="A dataset prepared by `nrgpt data text`.")] = None,
    held_out: Annotated[Path | None, Option(help="Another dataset, only to evaluate on.")] = None,
    mmlu: Annotated[
        Path | None, Option(help="MMLU's csv files, to ask 50 questions per subject.")
    ] = None,
    tokens: Annotated[int, Option(min=1, help="Training tokens per model.")] = 100_000_000,
    throughput: Annotated[
        float | None, Option(help="Tokens/s of one GPU, to estimate the full run.")
    ] = None,
    judge: Judge = "gpt2",
) -> None:
    """The models of the OpenWebText tables: losses against tokens, FLOPs and seconds, and texts.

    --quick without --data uses Shakespeare's characters.
    """
    cases = []
    if not shared.plots_only:
        if data is None and not shared.quick:
            raise ValueError("--data: name a dataset prepared by `nrgpt data text` or `data hub`")
        if data is not None:
            Dataset.open(located(data), verify=False)  # an error before anything is written
        data = data or prepare_dataset(DataConfig(task="shakespeare"))
        tokens = QUICK_TOKENS if shared.quick else tokens
        cases = text_study.cases(data, shared.recipe, shared.seeds or 1, tokens, shared.quick)
    options = {"held_out": held_out, "mmlu": mmlu, "throughput": throughput}
    shared.carry_out(text_study, cases, **options, **shared.with_texts(judge))


@reproduce_app.command(context_settings=FREE_FORM)
@with_options_of(Shared)
def variants(shared: Shared) -> None:
    """Variants of the energy, the norm, eta and the start, on ListOps and Shakespeare: losses,
    steps that raise an energy, speed."""
    seeds = shared.seeds or (1 if shared.quick else 3)
    shared.carry_out(variants_study, variants_study.cases(shared.recipe, seeds, shared.quick))


STUDIES: dict[str, Any] = {
    "listops": listops_study,
    "energy": energy_study,
    "shakespeare": shakespeare_study,
    "shakespeare_table": shakespeare_study,
    "text": text_study,
    "variants": variants_study,
}
"""By the folder of their records in experiments/."""


@reproduce_app.command()
def paper(quick: Quick = False) -> None:
    """All of it. Makes every figure and table from the records in experiments/, without training.

    --quick trains every study in tiny instead, in the paper's form, and writes to out/.
    """
    began = time.perf_counter()
    for name, study in STUDIES.items():
        texts: dict[str, Any] = {}
        if study in (shakespeare_study, text_study):
            texts = {"judge": None, "quick": quick}
        to, cases = folder(name, None, quick), []
        if quick and name != "shakespeare_table":  # there, a part of shakespeare
            cases = quick_cases(study)
        elif quick or not (to / "results.jsonl").exists():
            continue
        screen.rule(name)
        show(study.reproduce(cases, to, plots_only=not quick, **texts))
    screen.rule("flops")
    show(flops_study.reproduce(folder("flops", None, quick)))
    screen.print(f"all of it took {time.perf_counter() - began:,.0f} s")


def quick_cases(study: Any) -> list[Any]:
    """In the paper's form, except for what it does not have; one seed."""
    if study is text_study:
        data = prepare_dataset(DataConfig(task="shakespeare"))
        return text_study.cases(data, "paper", 1, QUICK_TOKENS, True)
    return study.cases("ours" if study is variants_study else "paper", 1, True)


@reproduce_app.command(hidden=True)
def runs(folders: list[Path]) -> None:
    """Train the runs configured in these folders as one pack. `nrgpt reproduce --processes N`
    starts its processes with this command."""
    train_pack([read_config(run / "config.json") for run in folders], folders)
