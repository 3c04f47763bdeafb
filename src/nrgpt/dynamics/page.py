"""A trajectory as one HTML page to hover over. It needs no server and no other file.

page.html is the page without its data.
"""

import json
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from ..model.network import IGNORED_TARGET
from .figures import Label
from .trajectory import Trajectory, energy_name


def write_page(
    seen: Trajectory,
    path: Path,
    label: Label = str,
    *,
    title: str = "trajectory",
    sample: int = 0,
    tokens: int = 64,
) -> None:
    """One sample's first tokens. ``label`` turns a token's number into its text; hovering shows the
    ``top`` tokens that the trajectory was made with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = page_data(seen, label, title, sample, tokens)
    data = json.dumps(values, separators=(",", ":"), allow_nan=False)
    # Whatever a text holds, no tag can begin or end inside <script>.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    path.write_text(template.replace("DATA_OF_THE_PAGE", data), encoding="utf-8")


def page_data(
    seen: Trajectory, label: Label, title: str, sample: int, tokens: int
) -> dict[str, Any]:
    part = (slice(None), sample, slice(tokens))
    watched = {energy_name(term): energy for term, energy in seen.energies.items()} | {
        "force ‖∂E/∂g‖": seen.force,
        "size ‖x‖": seen.size,
        "movement ‖Δg‖": seen.move,
        "entropy": seen.entropy,
        "loss if stopped here": seen.loss,
    }
    curves = {name: rows(value[part]) for name, value in watched.items() if value is not None}
    idx = seen.idx[sample, :tokens].tolist()
    # A state has moved since the one before it; the first has not.
    curves["movement ‖Δg‖"].insert(0, [None] * len(idx))
    top_tokens, chances = seen.said()
    said = top_tokens[part].tolist()
    targets = [None] * len(idx)
    if seen.targets is not None:
        given = seen.targets[sample, :tokens].tolist()
        targets = [None if token == IGNORED_TARGET else token for token in given]
    numbers = {n for state in said for token in state for n in token} | {*idx, *targets} - {None}
    return {
        "title": title,
        "trained": seen.trained_steps,
        "tokens": idx,
        "targets": targets,
        "curves": curves,
        "said": said,
        "chances": [rows(state) for state in chances[part]],
        "texts": {n: label(n) for n in sorted(numbers)},
    }


def rows(values: Tensor) -> list[list[float | None]]:
    """Six digits, which are enough to look at; JSON has no infinities."""
    return [
        [float(f"{v:.6g}") if math.isfinite(v) else None for v in row] for row in values.tolist()
    ]
