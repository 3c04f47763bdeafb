"""Public benchmarks that work offline, as task files of lm-eval.

Each ``NAME.yaml`` beside this is a task ``nrgpt_NAME``, which any model of lm-eval can be asked:

    lm_eval run --model hf --model_args pretrained=EXPORT --include_path FOLDER --tasks nrgpt_piqa

``nrgpt evaluate RUN --tasks blimp,piqa`` knows them without the prefix. Their questions come from
a folder (``--task-data`` or NRGPT_TASKS; docs/evaluation.md has the formats) or from the Hub.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
"""With the task files."""
PREFIX = "nrgpt_"
NAMES = (
    "blimp", "lambada", "arc_easy", "arc_challenge", "piqa", "winogrande", "winograd", "openbookqa",
)  # fmt: skip
