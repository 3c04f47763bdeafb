"""Tasks of lm-eval ("the harness"). MMLU is defined here, all others by the harness."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..extras import need
from ..measure.listops import Score, empty_table
from ..train.runs import Run
from .mmlu import MMLU, MMLUResult, is_mmlu, mmlu_tasks, subjects_of

SEED = 1234  # the harness's default, for tasks that draw their examples


@dataclass(frozen=True)
class TaskResults:
    mmlu: MMLUResult | None
    others: dict[str, dict[str, Any]]  # by task or group of tasks
    truncated: int  # number of prompts that were too long and lost their beginning

    def as_dict(self) -> dict[str, Any]:
        mmlu = {} if self.mmlu is None else {"mmlu": self.mmlu.as_dict()}
        return mmlu | self.others | {"truncated_prompts": self.truncated}

    def tables(self) -> list[Table]:
        tables = [] if self.mmlu is None else [self.mmlu.table()]
        if self.others:
            table = empty_table("Tasks", "task", "metric", "value", "standard error")
            for task, metrics in self.others.items():
                for name, value in metrics["metrics"].items():
                    error = metrics["stderr"].get(name)
                    shown = ["-" if x is None else f"{x:.4f}" for x in (value, error)]
                    table.add_row(task, name, *shown)
            tables.append(table)
        return tables


def mmlu_folder(folder: Path | None) -> Path | None:
    """Where MMLU's files are: as given, or as the environment says. None means the Hub."""
    source = "--mmlu"
    if folder is None and MMLU in os.environ:
        source, folder = f"{MMLU} =", Path(os.environ[MMLU])
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"{source} {folder}: there is no such folder")
    return folder


def known_tasks(tasks: Sequence[str], include: Path | None = None) -> Any:
    """lm-eval's manager of tasks, or an error if it is not installed, or does not know one."""
    need("lm_eval", "--tasks")
    from lm_eval.tasks import TaskManager

    theirs = [task for task in tasks if not is_mmlu(task)]
    for include_defaults in (False, True):  # listing all of the harness's own takes seconds
        manager = TaskManager(include_path=include, include_defaults=include_defaults)
        unknown = [task for task in theirs if task not in manager.all_tasks]
        if not unknown:
            return manager
    raise ValueError(
        f"--tasks {','.join(unknown)}: must be mmlu, mmlu_paper, mmlu_<subject>, or a task "
        "that lm-eval knows (`lm_eval ls tasks` lists them)"
    )


def run_tasks(
    run: Run,
    tasks: Sequence[str],
    *,
    steps: int | None = None,
    batch_size: int = 16,
    limit: int | None = None,
    mmlu: Path | None = None,
    include: Path | None = None,
    manager: Any = None,
) -> TaskResults:
    """Run tasks of the harness on a model. ``limit`` is the largest number of questions per task,
    ``mmlu`` a folder of MMLU's csv files, ``include`` a folder with more task files; ``manager``
    what ``known_tasks`` returned for the same."""
    manager = manager or known_tasks(tasks, include)
    from lm_eval.evaluator import evaluate

    from .harness import HarnessModel

    ours = [task for task in tasks if is_mmlu(task)]
    theirs = [task for task in tasks if not is_mmlu(task)]
    model = HarnessModel(run, steps=steps, batch_size=batch_size)
    folder = mmlu_folder(mmlu) if ours else None
    subjects = subjects_of(ours, folder)
    try:
        loaded = manager.load([*theirs, *mmlu_tasks(subjects, folder)])
    except ConnectionError as error:
        raise ValueError(
            f"the data of --tasks {','.join(tasks)} is not on this machine and could not be "
            f"downloaded ({error}); to read MMLU from files, use --mmlu FOLDER"
        ) from error
    # As in simple_evaluate, which we avoid because it also runs git in the current folder.
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=SEED)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    results = evaluate(lm=model, task_dict=loaded, limit=limit, log_samples=False)
    metrics = results["results"] | results.get("groups", {})
    scores = {}
    for subject in subjects:
        accuracy = metrics.pop(f"mmlu_{subject}")["acc,none"]
        asked = results["n-samples"][f"mmlu_{subject}"]["effective"]
        scores[subject] = Score(round(accuracy * asked), asked)
    return TaskResults(
        mmlu=MMLUResult(scores) if ours else None,
        others={name: readable(found) for name, found in metrics.items()},
        truncated=model.truncated,
    )


def readable(metrics: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Split the harness's keys, such as "acc,none" and "acc_stderr,none"."""
    found: dict[str, dict[str, float | None]] = {"metrics": {}, "stderr": {}}
    for key, value in metrics.items():
        metric, comma, filtered = key.partition(",")
        if comma:
            name = metric.removesuffix("_stderr") + ("" if filtered == "none" else f" ({filtered})")
            kind = "metrics" if metric == metric.removesuffix("_stderr") else "stderr"
            found[kind][name] = value if isinstance(value, int | float) else None
    return found
