"""A trajectory as one HTML page to hover over: no server, no network, nothing beside the file.

page.html is the page without its data.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ..model.network import IGNORED_TARGET
from .trajectory import Trajectory


def write_page(
    seen: Trajectory,
    path: Path,
    label: Callable[[int], str] = str,
    *,
    title: str = "trajectory",
    sample: int = 0,
    tokens: int = 64,
) -> None:
    """One sample's first tokens. ``label`` turns a token's number into its text; hovering shows as
    many readouts as the trajectory was made with (``top``)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = page_data(seen, label, title, sample, tokens)
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    path.write_text(template.replace("DATA_OF_THE_PAGE", embedded(data)), encoding="utf-8")


def embedded(data: Any) -> str:
    """JSON that may stand inside <script>: whatever a text holds, no tag can begin or end in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(
    seen: Trajectory, label: Callable[[int], str], title: str, sample: int, tokens: int
) -> dict[str, Any]:
    part = (slice(None), sample, slice(tokens))
    names = {"total": "energy", "feedforward": "feed-forward energy"}
    curves = {
        names.get(name, f"{name} energy"): rows(value[part])
        for name, value in seen.energies.items()
    }
    if seen.force is not None:
        curves["force ‖∂E/∂g‖"] = rows(seen.force[part])
    curves["size ‖x‖"] = rows(seen.size[part])
    # A state has moved since the one before it; the first has not.
    curves["movement ‖Δg‖"] = [[None] * len(seen.idx[sample, :tokens]), *rows(seen.move[part])]
    tokens_said, chances = seen.said()
    assert seen.entropy is not None
    curves["readout entropy"] = rows(seen.entropy[part])
    if seen.loss is not None:
        curves["loss if stopped here"] = rows(seen.loss[part])
    said = tokens_said[part].tolist()
    idx = seen.idx[sample, :tokens].tolist()
    targets = [IGNORED_TARGET] * len(idx)
    if seen.targets is not None:
        targets = seen.targets[sample, :tokens].tolist()
    numbers = {n for state in said for token in state for n in token} | {*idx, *targets}
    return {
        "title": title,
        "trained": seen.trained_steps,
        "tokens": idx,
        "targets": [None if token == IGNORED_TARGET else token for token in targets],
        "curves": curves,
        "said": said,
        "chances": [rows(state) for state in chances[part]],
        "texts": {n: label(n) for n in sorted(numbers - {IGNORED_TARGET})},
    }


def rows(values: Tensor) -> list[list[float | None]]:
    """Six digits are enough to look at; JSON has no infinities."""
    return [
        [float(f"{v:.6g}") if math.isfinite(v) else None for v in row] for row in values.tolist()
    ]
