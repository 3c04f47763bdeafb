"""The experiments of the paper, and our own recipes, as functions that make a TrainConfig.

Names are ``<task>_<model>`` for our recipe, with ``_paper`` behind it for what the paper's text
says and ``_released`` for what its authors' code does. ``nrgpt presets`` lists them all.
"""

import functools
from collections.abc import Callable
from typing import Any

from ..config import TrainConfig
from .listops import LISTOPS_WIDTHS as LISTOPS_WIDTHS
from .listops import debug, demo, energy_certified, energy_figure, listops
from .models import CERTIFIED as CERTIFIED
from .models import MODELS as MODELS
from .models import SETTLED as SETTLED
from .models import certified, settled
from .models import paper_model as paper_model
from .shakespeare import SHAKESPEARE_ROWS as SHAKESPEARE_ROWS
from .shakespeare import neighbour, shakespeare, shakespeare_cpu
from .text import LOOPED, openwebtext

GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "listops_widths": {"model.width": LISTOPS_WIDTHS},
    "shakespeare": {
        "model.width": (32, 64, 128, 256, 380, 512, 768),
        "model.heads": (1, 2, 8),
        "model.steps": (3, 6, 8),
        "optimiser.lr": (1e-3, 7.5e-4, 3e-4, 1e-4),
        "optimiser.decay": ("cosine", "exponential"),
        "optimiser.final": (0.1, 0.05, 0.01),
    },
}
"""Named grids for ``nrgpt sweep``: the paper's."""

RECIPES: dict[str, tuple[Any, ...]] = {
    "debug": (debug,),
    "demo": (demo,),
    "energy_30_steps_paper": (energy_figure, 30, "identity"),
    "energy_100_steps_paper": (energy_figure, 100, "free"),
    "energy_30_steps_certified": (energy_certified,),
    "listops_nrgpt_certified": (certified, listops),
    "listops_nrgpt_settled": (settled, listops, (0.15, 2), {"model.hidden_factor": 2}),
    "listops_nrgpt_ff1": (listops, "nrgpt_ff1", ""),
    "listops_nrgpt_ff1_paper": (listops, "nrgpt_ff1", "paper"),
    "listops_nrgpt_ff1_released": (listops, "nrgpt_ff1", "released"),
    "listops_nrgpt_ff2w": (listops, "nrgpt_ff2w", ""),
    "listops_nrgpt_ff2w_paper": (listops, "nrgpt_ff2w", "paper"),
    "listops_nrgpt_ff2w_released": (listops, "nrgpt_ff2w", "released"),
    "listops_nrgpt_ff2": (listops, "nrgpt_ff2", ""),
    "listops_nrgpt_ff2_paper": (listops, "nrgpt_ff2", "paper"),
    "listops_nrgpt_ff2_released": (listops, "nrgpt_ff2", "released"),
    "listops_gpt": (listops, "gpt", ""),
    "listops_gpt_paper": (listops, "gpt", "paper"),
    "listops_gpt_released": (listops, "gpt", "released"),
    "listops_rgpt": (listops, "rgpt", ""),
    "listops_rgpt_paper": (listops, "rgpt", "paper"),
    "listops_rgpt_released": (listops, "rgpt", "released"),
    "listops_rgpt_parallel": (listops, "rgpt_parallel", ""),
    "listops_rgpt_parallel_paper": (listops, "rgpt_parallel", "paper"),
    "listops_rgpt_parallel_released": (listops, "rgpt_parallel", "released"),
    "shakespeare_cpu": (shakespeare_cpu, 5),
    "shakespeare_nrgpt_certified": (certified, shakespeare),
    "shakespeare_nrgpt_settled": (settled, shakespeare, (0.15, 3), {"model.width": 80}),
    "shakespeare_nrgpt_ff1": (shakespeare, "nrgpt_ff1", ""),
    "shakespeare_nrgpt_ff1_paper": (shakespeare, "nrgpt_ff1", "paper"),
    "shakespeare_nrgpt_ff1_released": (shakespeare, "nrgpt_ff1", "released"),
    "shakespeare_nrgpt_ff2w": (shakespeare, "nrgpt_ff2w", ""),
    "shakespeare_nrgpt_ff2w_paper": (shakespeare, "nrgpt_ff2w", "paper"),
    "shakespeare_nrgpt_ff2w_released": (shakespeare, "nrgpt_ff2w", "released"),
    "shakespeare_et": (neighbour, "et"),
    "shakespeare_ebt": (neighbour, "ebt"),
    "shakespeare_gpt": (shakespeare, "gpt", ""),
    "shakespeare_gpt_paper": (shakespeare, "gpt", "paper"),
    "shakespeare_gpt_released": (shakespeare, "gpt", "released"),
    "shakespeare_rgpt": (shakespeare, "rgpt", ""),
    "shakespeare_rgpt_paper": (shakespeare, "rgpt", "paper"),
    "shakespeare_rgpt_released": (shakespeare, "rgpt", "released"),
    "shakespeare_rgpt_parallel": (shakespeare, "rgpt_parallel", ""),
    "shakespeare_rgpt_parallel_paper": (shakespeare, "rgpt_parallel", "paper"),
    "shakespeare_rgpt_parallel_released": (shakespeare, "rgpt_parallel", "released"),
    "owt_nrgpt_certified": (certified, openwebtext),
    "owt_nrgpt_settled": (settled, openwebtext, (0.15, 3), {**LOOPED, "optimiser.lr": 3e-3}),
    "owt_nrgpt_ff1": (openwebtext, "nrgpt_ff1", ""),
    "owt_nrgpt_ff1_paper": (openwebtext, "nrgpt_ff1", "paper"),
    "owt_nrgpt_ff1_released": (openwebtext, "nrgpt_ff1", "released"),
    "owt_nrgpt_ff2w": (openwebtext, "nrgpt_ff2w", ""),
    "owt_nrgpt_ff2w_paper": (openwebtext, "nrgpt_ff2w", "paper"),
    "owt_nrgpt_ff2w_released": (openwebtext, "nrgpt_ff2w", "released"),
    "owt_gpt": (openwebtext, "gpt", ""),
    "owt_gpt_paper": (openwebtext, "gpt", "paper"),
    "owt_gpt_released": (openwebtext, "gpt", "released"),
    "owt_rgpt": (openwebtext, "rgpt", ""),
    "owt_rgpt_paper": (openwebtext, "rgpt", "paper"),
    "owt_rgpt_released": (openwebtext, "rgpt", "released"),
    "owt_rgpt_parallel": (openwebtext, "rgpt_parallel", ""),
    "owt_rgpt_parallel_paper": (openwebtext, "rgpt_parallel", "paper"),
    "owt_rgpt_parallel_released": (openwebtext, "rgpt_parallel", "released"),
    "owt_nrgpt_ff2w_equal_parameters": (openwebtext, "nrgpt_ff2w", "", True),
    "owt_nrgpt_ff2w_equal_parameters_paper": (openwebtext, "nrgpt_ff2w", "paper", True),
    "owt_nrgpt_ff2w_equal_parameters_released": (openwebtext, "nrgpt_ff2w", "released", True),
    "owt_gpt_equal_parameters": (openwebtext, "gpt", "", True),
    "owt_gpt_equal_parameters_paper": (openwebtext, "gpt", "paper", True),
    "owt_gpt_equal_parameters_released": (openwebtext, "gpt", "released", True),
    "owt_rgpt_parallel_equal_parameters": (openwebtext, "rgpt_parallel", "", True),
    "owt_rgpt_parallel_equal_parameters_paper": (openwebtext, "rgpt_parallel", "paper", True),
    "owt_rgpt_parallel_equal_parameters_released": (openwebtext, "rgpt_parallel", "released", True),
}
PRESETS: dict[str, Callable[[], TrainConfig]] = {
    name: functools.update_wrapper(functools.partial(make, *arguments), make)
    for name, (make, *arguments) in RECIPES.items()
}
