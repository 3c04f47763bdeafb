"""The paper's table of MMLU, from the answers on record."""

import math
import statistics
from collections.abc import Sequence
from functools import partial

from ..evaluate.mmlu import GROUPS, standard_error
from ..measure.listops import Score
from . import tables
from .tables import Column, Row, grouped, of_first

PAPERS = {
    "NRGPT (128M)": (35.5, 32.1, 31.5, 30.0, 30.5, 29.2, 19.0, 29.3),
    "RGPT (126M)": (28.3, 27.1, 28.0, 32.1, 25.2, 24.1, 17.0, 26.0),
    "GPT (124M)": (36.8, 29.5, 26.2, 26.7, 31.2, 27.3, 18.0, 28.0),
}
"""Its seven columns and its average, as printed."""


def mmlu_table(rows: Sequence[Row], questions: int) -> str:
    """A line for each model, and the paper's. ``questions``: the most that a subject was asked."""
    asked = [row for row in rows if "mmlu" in row]
    columns: dict[str, Column] = {"model": of_first("{model}"), "seeds": len}
    columns |= {name: partial(of_group, name=name) for name in GROUPS}
    columns |= {"mean of the groups": mean_of_groups, "all questions": all_questions}
    said = (
        "# MMLU\n\nFive-shot, by the likelihood of the four letters, in percent ± standard error "
        "over questions (seeds are asked the same ones: their mean has the error of one); at most "
        f"{questions} questions of each subject. Chance is 25. Which subjects make a column is our "
        "guess by their names (evaluate/mmlu.py). The paper searches generated text for letters, "
        "so its numbers, below, are not comparable.\n\n"
    )
    papers = [
        [f"{name}, paper", "", *(f"{value:.1f}" for value in values), ""]
        for name, values in PAPERS.items()
    ]
    return said + tables.table(columns, grouped(asked, "model").values(), *papers)


def over_seeds(scores: Sequence[Score]) -> tuple[float, float]:
    """The mean accuracy of several models that were asked the same questions, and its error."""
    mean = statistics.fmean(score.accuracy for score in scores)
    total = scores[0].total
    return mean, standard_error(Score(round(mean * total), total))


def in_percent(mean: float, error: float) -> str:
    return f"{100 * mean:.1f} ± {100 * error:.1f}"


def all_questions(rows: Sequence[Row]) -> str:
    asked = [row["mmlu"]["overall"] for row in rows if "mmlu" in row]
    scores = [Score(one["correct"], one["total"]) for one in asked]
    return in_percent(*over_seeds(scores)) if scores else "-"


def scores_of(rows: Sequence[Row], name: str) -> list[Score]:
    """Of a group of subjects, a score for each seed that was asked."""
    found = [row["mmlu"]["groups"].get(name) for row in rows]
    return [Score(one["correct"], one["total"]) for one in found if one is not None]


def of_group(rows: Sequence[Row], name: str) -> str:
    scores = scores_of(rows, name)
    return in_percent(*over_seeds(scores)) if scores else "-"


def mean_of_groups(rows: Sequence[Row]) -> str:
    """The mean over the groups, as in the paper's last column."""
    scores = [scores_of(rows, name) for name in GROUPS]
    if not all(scores):
        return "-"
    found = [over_seeds(own) for own in scores]
    error = math.sqrt(sum(error**2 for _, error in found)) / len(found)
    return in_percent(statistics.fmean(mean for mean, _ in found), error)
