"""Tasks of lm-eval ("the harness"): MMLU and the benchmarks are ours, all others the harness's."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..extras import need
from ..measure.listops import Score, empty_table
from ..train.runs import Run
from .benchmarks import FOLDER, NAMES, PREFIX
from .benchmarks.questions import TASKS, file_of
from .mmlu import MMLU, MMLUResult, is_mmlu, mmlu_tasks, subjects_of
from .preference import preferences

SEED = 1234  # the harness's default, for tasks that draw their examples


@dataclass(frozen=True)
class TaskResults:
    mmlu: MMLUResult | None
    others: dict[str, dict[str, Any]]  # by task or group of tasks
    truncated: int  # number of prompts that were too long and lost their beginning
    energies: dict[str, dict[str, float]] | None = None
    """What BLiMP's pairs are to the model's energies, if it has any (nrgpt.evaluate.preference)."""

    def as_dict(self) -> dict[str, Any]:
        mmlu = {} if self.mmlu is None else {"mmlu": self.mmlu.as_dict()}
        energies = {} if self.energies is None else {"blimp_energies": self.energies}
        return mmlu | self.others | energies | {"truncated_prompts": self.truncated}

    def tables(self) -> list[Table]:
        tables = [] if self.mmlu is None else [self.mmlu.table()]
        if self.others:
            table = empty_table("Tasks", "task", "metric", "value", "standard error", "chance")
            for task, metrics in self.others.items():
                chance = metrics.get("chance")
                for name, value in metrics["metrics"].items():
                    numbers = (value, metrics["stderr"].get(name))
                    level = None if name == "perplexity" else chance
                    shown = ["-" if x is None else f"{x:.4f}" for x in (*numbers, level)]
                    table.add_row(task, name, *shown)
            for name, found in (self.energies or {}).items():
                told = (f"{x:.4f}" for x in (found["value"], found["stderr"], 0.5))
                table.add_row("blimp", f"by {name}", *told)
            tables.append(table)
        return tables


def mmlu_folder(folder: Path | None) -> Path | None:
    """Where MMLU's files are: as given, or as the environment says. None means the Hub."""
    return folder_of("--mmlu", folder, MMLU)


def folder_of(source: str, folder: Path | None, variable: str) -> Path | None:
    if folder is None and os.environ.get(variable):
        source, folder = f"{variable} =", Path(os.environ[variable])
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"{source} {folder}: there is no such folder")
    return folder


def known_tasks(tasks: Sequence[str], include: Path | None = None, data: Path | None = None) -> Any:
    """lm-eval's manager of tasks, or an error if it is not installed, does not know one, or a file
    of a benchmark is missing in the folder ``data``."""
    need("lm_eval", "--tasks")
    from lm_eval.tasks import TaskManager

    theirs = [named(task) for task in tasks if not is_mmlu(task)]
    folders = [FOLDER] if include is None else [FOLDER, include]
    folder = task_folder(data)
    for task in set(tasks) & set(NAMES):
        if folder is not None:
            file_of(task, folder)
    metadata: Any = {} if folder is None else {"folder": str(folder)}
    for include_defaults in (False, True):  # listing all of the harness's own takes seconds
        options = {"include_defaults": include_defaults, "metadata": metadata}
        manager = TaskManager(include_path=folders, **options)
        unknown = [task for task in theirs if task not in manager.all_tasks]
        if not unknown:
            return manager
    raise ValueError(
        f"--tasks {','.join(unknown)}: must be mmlu, mmlu_paper, mmlu_<subject>, "
        f"{', '.join(NAMES)}, or a task that lm-eval knows (`lm_eval ls tasks` lists them)"
    )


def named(task: str) -> str:
    """A benchmark as its task file calls it."""
    return PREFIX + task if task in NAMES else task


def task_folder(folder: Path | None) -> Path | None:
    """Where the benchmarks' files are: as given, or as the environment says. None: the Hub."""
    return folder_of("--task-data", folder, TASKS)


def run_tasks(
    run: Run,
    tasks: Sequence[str],
    *,
    steps: int | None = None,
    batch_size: int = 16,
    limit: int | None = None,
    mmlu: Path | None = None,
    include: Path | None = None,
    data: Path | None = None,
    manager: Any = None,
) -> TaskResults:
    """Run tasks of the harness on a model. ``limit`` is the largest number of questions per task,
    ``mmlu`` a folder of MMLU's csv files, ``include`` a folder with more task files, ``data`` one
    with the benchmarks' questions; ``manager`` what ``known_tasks`` returned for the same."""
    manager = manager or known_tasks(tasks, include, data)
    from lm_eval.evaluator import evaluate

    from .harness import HarnessModel

    ours = [task for task in tasks if is_mmlu(task)]
    theirs = [named(task) for task in tasks if not is_mmlu(task)]
    model = HarnessModel(run, steps=steps, batch_size=batch_size)
    folder = mmlu_folder(mmlu) if ours else None
    subjects = subjects_of(ours, folder)
    try:
        loaded = manager.load([*theirs, *mmlu_tasks(subjects, folder)])
    except ConnectionError as error:
        raise ValueError(
            f"the data of --tasks {','.join(tasks)} is not on this machine and could not be "
            f"downloaded ({error}); to read it from files, use --task-data or --mmlu FOLDER"
        ) from error
    # As in simple_evaluate, which we avoid because it also runs git in the current folder.
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=SEED)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    try:
        results = evaluate(lm=model, task_dict=loaded, limit=limit, log_samples=False)
    except OverflowError as error:
        raise ValueError(
            f"--tasks {','.join(tasks)}: a perplexity is too large for a number ({error}): to the "
            "model these texts are all but impossible"
        ) from error
    metrics = results["results"] | results.get("groups", {})
    scores = {}
    for subject in subjects:
        accuracy = metrics.pop(f"mmlu_{subject}")["acc,none"]
        asked = results["n-samples"][f"mmlu_{subject}"]["effective"]
        scores[subject] = Score(round(accuracy * asked), asked)
    others = {name: readable(found) for name, found in metrics.items()}
    for name, task in loaded["tasks"].items():
        if name in others and (chance := chance_of(task)) is not None:
            others[name]["chance"] = chance
    energies = None
    if PREFIX + "blimp" in theirs and run.model.cfg.block == "nrgpt":
        pairs = list(loaded["tasks"][PREFIX + "blimp"].test_docs())[:limit]
        energies = preferences(run, pairs, steps=steps, batch_size=batch_size)
    return TaskResults(
        mmlu=MMLUResult(scores) if ours else None,
        others={name.removeprefix(PREFIX): found for name, found in others.items()},
        truncated=model.truncated,
        energies=energies,
    )


def chance_of(task: Any) -> float | None:
    """The share of a benchmark's questions that guessing answers."""
    if not task.config.task.startswith(PREFIX) or task.OUTPUT_TYPE != "multiple_choice":
        return None
    choices = [len(task.doc_to_choice(question)) for question in task.test_docs()]
    return sum(1 / count for count in choices) / len(choices)


def readable(metrics: dict[str, Any]) -> dict[str, Any]:
    """Split the harness's keys, such as "acc,none" and "acc_stderr,none"."""
    found: dict[str, Any] = {"metrics": {}, "stderr": {}}
    for key, value in metrics.items():
        metric, comma, filtered = key.partition(",")
        if comma:
            name = metric.removesuffix("_stderr") + ("" if filtered == "none" else f" ({filtered})")
            kind = "metrics" if metric == metric.removesuffix("_stderr") else "stderr"
            found[kind][name] = value if isinstance(value, int | float) else None
    return found
