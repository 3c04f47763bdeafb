"""A trajectory, or a survey of a landscape, as one HTML page to look around in: the explorer
(nrgpt.explore) with a recording in place of a model. It needs no server and no other file."""

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from ..explore.page import page
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
    **more: Any,
) -> None:
    """One sample's first tokens. ``label`` turns a token's number into its text; the page shows the
    ``top`` tokens that the trajectory was made with. ``more`` is for the page as it is: a
    ``landscape``, ``certificates``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = recording(seen, label, title, sample, tokens)
    shown["recorded"]["landscape"] = more.pop("landscape", None)
    path.write_text(page([shown | more]), encoding="utf-8", errors="replace")


def recording(
    seen: Trajectory, label: Label, title: str, sample: int = 0, tokens: int = 64
) -> dict[str, Any]:
    """What the page is told in place of a model; the same as ``about`` of nrgpt.explore.models."""
    record = record_of(seen, sample, tokens)
    numbers = {*record["tokens"], *(record["targets"] or ())} - {None}
    numbers |= {n for state in record["said"] for token in state for n in token}
    texts = {n: label(n) for n in sorted(numbers)}
    return {
        "name": title,
        "what": "",
        "steps": seen.trained_steps,
        "context": len(record["tokens"]),
        "symbols": None,
        "texts": texts,
        "examples": ["".join(texts[n] for n in record["tokens"])],
        "terms": [name for name in seen.energies if name != "total"],
        "certificates": None,
        "recorded": record,
    }


def record_of(seen: Trajectory, sample: int = 0, tokens: int | None = None) -> dict[str, Any]:
    """Tokens, curves by name (states, tokens), and what the model would say."""
    part = (slice(None), sample, slice(tokens))
    watched = {energy_name(term): energy for term, energy in seen.energies.items()}
    watched |= {name: getattr(seen, name) for name in ("force", "size", "angle", "entropy", "loss")}
    curves = {name: rows(value[part]) for name, value in watched.items() if value is not None}
    idx = seen.idx[sample, :tokens].tolist()
    # A state has moved since the one before it; the first has not.
    curves["movement"] = [[None] * len(idx), *rows(seen.move[part])]
    if seen.push is not None and bool(seen.push[part][:-1].any()):  # of the step that follows
        curves["push"] = [*rows(seen.push[part][:-1]), [None] * len(idx)]
    top_tokens, chances = seen.said()
    targets = None
    if seen.targets is not None:
        given = seen.targets[sample, :tokens].tolist()
        targets = [None if token == IGNORED_TARGET else token for token in given]
    return {
        "tokens": idx,
        "targets": targets,
        "steps": seen.steps,
        "curves": curves,
        "said": top_tokens[part].tolist(),
        "chances": [rows(state) for state in chances[part]],
    }


def rows(values: Tensor) -> list[list[float | None]]:
    """Six digits, which are enough to look at; JSON has no infinities."""
    return [
        [float(f"{v:.6g}") if math.isfinite(v) else None for v in row] for row in values.tolist()
    ]
