"""MMLU, five-shot, by likelihood: the answer is the likeliest of " A", " B", " C", " D".

The questions come from the Hub (cais/mmlu) or from a folder of csv files, with answers 0 to 3:

    dev/<subject>_dev.csv, test/<subject>_test.csv: question,choice0,choice1,choice2,choice3,answer

The paper's table has seven columns but does not say which of the 57 subjects belong to which.
GROUPS is our guess, based on their names.
"""

import contextlib
import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..check import suggestion
from ..extras import need
from ..measure.listops import SCORE_HEADINGS, Score, empty_table
from ..train.runs import Run

MMLU = "NRGPT_MMLU"  # environment variable: a folder of csv files to use instead of the Hub
HUB = "cais/mmlu"
SHOTS = 5
LETTERS = ["A", "B", "C", "D"]
COLUMNS = ["question", "choice0", "choice1", "choice2", "choice3", "answer"]

GROUPS: dict[str, tuple[str, ...]] = {
    "Astronomy": ("astronomy",),
    "Science": (
        "college_biology", "college_chemistry", "college_physics", "conceptual_physics",
        "electrical_engineering", "high_school_biology", "high_school_chemistry",
        "high_school_physics",
    ),
    "CS": (
        "college_computer_science", "computer_security", "high_school_computer_science",
        "machine_learning",
    ),
    "Economics": ("econometrics", "high_school_macroeconomics", "high_school_microeconomics"),
    "Medicine": (
        "anatomy", "clinical_knowledge", "college_medicine", "medical_genetics", "nutrition",
        "professional_medicine", "virology",
    ),
    "Math": (
        "abstract_algebra", "college_mathematics", "elementary_mathematics",
        "high_school_mathematics", "high_school_statistics",
    ),
    "Global Facts": ("global_facts",),
}  # fmt: skip
"""The columns of the paper's table."""

OTHERS = (
    "business_ethics", "formal_logic", "high_school_european_history", "high_school_geography",
    "high_school_government_and_politics", "high_school_psychology", "high_school_us_history",
    "high_school_world_history", "human_aging", "human_sexuality", "international_law",
    "jurisprudence", "logical_fallacies", "management", "marketing", "miscellaneous",
    "moral_disputes", "moral_scenarios", "philosophy", "prehistory", "professional_accounting",
    "professional_law", "professional_psychology", "public_relations", "security_studies",
    "sociology", "us_foreign_policy", "world_religions",
)  # fmt: skip
"""Subjects that are not in the paper's table."""

IN_TABLE = tuple(subject for subjects in GROUPS.values() for subject in subjects)
SUBJECTS = (*IN_TABLE, *OTHERS)


def is_mmlu(task: str) -> bool:
    return task in ("mmlu", "mmlu_paper") or task.removeprefix("mmlu_") in SUBJECTS


def subjects_of(tasks: Sequence[str], folder: Path | None) -> list[str]:
    """The subjects of some tasks: ``mmlu`` means all, ``mmlu_paper`` those in the paper's table,
    ``mmlu_astronomy`` one. A folder need not hold all of them."""
    wanted: set[str] = set()
    for task in tasks:
        every = {"mmlu": SUBJECTS, "mmlu_paper": IN_TABLE}.get(task)
        if every is None:
            wanted.add(task.removeprefix("mmlu_"))
            continue
        there = {s for s in every if folder is None or csv_file(folder, "test", s).is_file()}
        if folder is not None and not there:
            expected = csv_file(folder, "test", every[0])
            raise FileNotFoundError(f"{folder} has no subject of MMLU: no file like {expected}")
        wanted |= there
    return [subject for subject in SUBJECTS if subject in wanted]


def csv_file(folder: Path, split: str, subject: str) -> Path:
    return folder / split / f"{subject}_{split}.csv"


def read_questions(path: Path) -> list[dict[str, Any]]:
    """The questions, choices and answers in a file, in the Hub's format."""
    if not path.is_file():
        raise FileNotFoundError(f"MMLU: there is no file {path}")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            questions = list(questions_in(file, path))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a table of questions ({error})") from error
    if not questions:
        raise ValueError(f"{path} has no questions")
    return questions


def questions_in(file: Iterable[str], path: Path) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(file)
    if reader.fieldnames != COLUMNS:
        raise ValueError(f"{path}: the columns must be {','.join(COLUMNS)}")
    for row in reader:
        if None in row or None in row.values() or row["answer"] not in ("0", "1", "2", "3"):
            raise ValueError(
                f"{path}: line {reader.line_num}: must be a question, four choices and an "
                f"answer from 0 to 3"
            )
        question, *choices, answer = row.values()
        yield {"question": question, "choices": choices, "answer": int(answer)}


def read_examples(folder: Path, subject: str, shots: int) -> list[dict[str, Any]]:
    path = csv_file(folder, "dev", subject)
    examples = read_questions(path)
    if len(examples) < shots:
        raise ValueError(f"{path}: has fewer than the {shots} examples that a prompt needs")
    return examples[:shots]


def prompt(question: Mapping[str, Any]) -> str:
    choices = zip(LETTERS, question["choices"], strict=True)
    lines = [question["question"].strip(), *(f"{letter}. {text}" for letter, text in choices)]
    return "\n".join([*lines, "Answer:"])


def mmlu_tasks(
    subjects: Sequence[str], folder: Path | None = None, shots: int = SHOTS
) -> list[Any]:
    """Tasks for lm-eval, one per subject. They work with any of its models."""
    for subject in subjects:
        if subject not in SUBJECTS:
            raise ValueError(f"MMLU has no subject {subject!r}{suggestion(subject, SUBJECTS)}")
    datasets = need("datasets", "MMLU")
    task_class = need("lm_eval.api.task", "MMLU").ConfigurableTask

    class Subject(task_class):  # type: ignore[misc,valid-type]
        """Reads files itself: ConfigurableTask would write copies of them into a cache."""

        def download(self, dataset_kwargs: Any = None, **options: Any) -> None:
            subject = self.config.dataset_name
            if folder is None:
                self.dataset = datasets.load_dataset(HUB, subject)
                return
            rows = {
                "test": read_questions(csv_file(folder, "test", subject)),
                "dev": read_examples(folder, subject, shots),
            }
            self.dataset = {split: datasets.Dataset.from_list(rows[split]) for split in rows}

        def build_all_requests(self, **options: Any) -> None:
            with contextlib.redirect_stderr(io.StringIO()):  # hides a progress bar per subject
                super().build_all_requests(**options)

    same = {
        "test_split": "test",
        "fewshot_split": "dev",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": shots,
        "output_type": "multiple_choice",
        "doc_to_text": prompt,
        "doc_to_choice": LETTERS,
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    tasks = []
    for name in track(subjects, "MMLU's subjects", disable=len(subjects) < 2):
        own = {"task": f"mmlu_{name}", "dataset_name": name, "description": introduction(name)}
        tasks.append(Subject(config=same | own))
    return tasks


def introduction(subject: str) -> str:
    about = subject.replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {about}.\n\n"


@dataclass(frozen=True)
class MMLUResult:
    subjects: dict[str, Score]
    said: dict[str, int] | None = field(default=None, compare=False)
    """How often the model chose each letter, if known. One that always says A is right as often
    as A is the answer."""

    @property
    def groups(self) -> dict[str, Score]:
        """The paper's groups, each over all its questions, as far as they were asked."""
        found = {name: self.score_of(subjects) for name, subjects in GROUPS.items()}
        return {name: score for name, score in found.items() if score is not None}

    @property
    def others(self) -> Score | None:
        return self.score_of(OTHERS)

    def score_of(self, subjects: Sequence[str]) -> Score | None:
        scores = [self.subjects[s] for s in subjects if s in self.subjects]
        return pooled(scores) if scores else None

    @property
    def overall(self) -> Score:
        return pooled(list(self.subjects.values()))

    @property
    def average(self) -> tuple[float, float] | None:
        """The mean over the groups, like the paper's last column, and its standard error. None
        unless all groups were asked."""
        scores = list(self.groups.values())
        if len(scores) < len(GROUPS):
            return None
        mean = sum(score.accuracy for score in scores) / len(scores)
        return mean, math.sqrt(sum(standard_error(score) ** 2 for score in scores)) / len(scores)

    def as_dict(self) -> dict[str, Any]:
        average, others = self.average, self.others
        return {
            "groups": {name: with_error(score) for name, score in self.groups.items()},
            "others": others and with_error(others),
            "average_of_groups": average and {"accuracy": average[0], "stderr": average[1]},
            "overall": with_error(self.overall),
            "subjects": {name: with_error(score) for name, score in self.subjects.items()},
            "said": self.said,
        }

    def table(self) -> Table:
        title = f"MMLU, five-shot, {len(self.subjects)} of {len(SUBJECTS)} subjects"
        table = empty_table(title, "group", *SCORE_HEADINGS[1:], "standard error")
        others, overall = {"not in the paper's table": self.others}, {"all questions": self.overall}
        for name, score in (self.groups | others | overall).items():
            if score is not None:
                table.add_row(name, *score.cells(digits=1), percent(standard_error(score)))
        if (average := self.average) is not None:
            table.add_row("mean of the groups", "", "", percent(average[0]), percent(average[1]))
        return table


@torch.no_grad()
def ask(
    run: Run,
    folder: Path,
    *,
    limit: int | None = None,
    shots: int = SHOTS,
    batch_size: int = 32,
) -> MMLUResult:
    """The same questions and scores without lm-eval, which may not be installed. Each question
    takes one forward pass. ``limit`` is the largest number of questions per subject."""
    answers = [run.encode(f" {letter}") for letter in LETTERS]
    if len({tuple(answer[:-1]) for answer in answers}) > 1:
        raise ValueError(
            "MMLU: the four letters must differ only in their last token; with this tokenizer they "
            "do not, so use nrgpt evaluate --tasks mmlu"
        )
    last = torch.tensor([answer[-1] for answer in answers])
    asked: list[tuple[Tensor, str, int]] = []
    for subject in subjects_of(["mmlu"], folder):
        examples = read_examples(folder, subject, shots)
        shown = [f"{prompt(one)} {LETTERS[one['answer']]}\n\n" for one in examples]
        before = "".join([introduction(subject), *shown])
        for question in read_questions(csv_file(folder, "test", subject))[:limit]:
            tokens = torch.tensor([*run.encode(before + prompt(question)), *answers[0][:-1]])
            asked.append((tokens[-run.model.cfg.context :], subject, question["answer"]))
    asked.sort(key=lambda one: -len(one[0]))
    right, letters = Counter[str](), dict.fromkeys(LETTERS, 0)
    for i in track(range(0, len(asked), batch_size), "MMLU"):
        batch = asked[i : i + batch_size]
        rows = [tokens for tokens, _, _ in batch]
        idx = pad_sequence(rows, batch_first=True).to(run.model.tokens.device)
        x = run.model.last_state(idx, dropout=False)  # a causal model ignores padding on the right
        ends = torch.tensor([len(row) - 1 for row in rows], device=idx.device)
        logits = run.model.readout(x[torch.arange(len(rows), device=idx.device), ends])
        if not logits.isfinite().all():
            raise ValueError("MMLU: the model's logits are not finite")
        said = logits[:, last.to(idx.device)].argmax(-1).tolist()
        for (_, subject, answer), one in zip(batch, said, strict=True):
            letters[LETTERS[one]] += 1
            right[subject] += one == answer
    totals = Counter(subject for _, subject, _ in asked)
    scores = {name: Score(right[name], total) for name, total in totals.items()}
    return MMLUResult(scores, letters)


def pooled(scores: Sequence[Score]) -> Score:
    return Score(sum(s.correct for s in scores), sum(s.total for s in scores))


def standard_error(score: Score) -> float:
    """Of the accuracy over independent questions, as lm-eval computes it."""
    p = score.accuracy
    return math.sqrt(p * (1 - p) / (score.total - 1)) if score.total > 1 else float("nan")


def with_error(score: Score) -> dict[str, Any]:
    error = standard_error(score)
    return score.as_dict() | {"stderr": None if math.isnan(error) else error}


def percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"
