"""What the task files of this folder call."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from nrgpt.evaluate.benchmarks.questions import questions
from nrgpt.extras import need


def asked(name: str, folder: str | None = None, **metadata: Any) -> dict[str, Any]:
    """As lm-eval wants a dataset. It hands over the task's metadata."""
    return {"test": need("datasets", name).Dataset.from_list(questions(name, folder))}


blimp, lambada, arc_easy, arc_challenge, piqa, winogrande, winograd, openbookqa = (
    partial(asked, name)
    for name in (
        "blimp", "lambada", "arc_easy", "arc_challenge", "piqa", "winogrande", "winograd",
        "openbookqa",
    )
)  # fmt: skip


def preferred(question: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Of BLiMP: whether the good sentence is likelier; equally likely is wrong. Counted for all
    pairs and for their field. All kinds have as many pairs, so that the mean is one over kinds."""
    (bad, _), (good, _) = results
    right = float(good > bad)
    return {"acc": right, question["field"].replace("/", "_"): right}
