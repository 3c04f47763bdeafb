"""What a run folder tells of earlier processes, for the one that goes on or must not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import checkpoint
from .metrics import FILE, Metrics, read

WAY_OUT = "Try a smaller optimiser.lr, a longer warm-up, or precision = fp32, in another folder"
"""For losses that are not finite."""


def refuse_to_start_over(run: Path) -> None:
    """A folder with a history but without a checkpoint to go on from is not begun anew."""
    entries, _ = read(run / FILE)
    aside = [path.name for path in checkpoint.aside(run / "checkpoints")]
    if not entries and not aside:
        return
    found = f"{len(entries):,} lines of {FILE}"
    if aside:
        found += f" and, set aside, {', '.join(aside)}"
    if bad := [name for name in aside if name.startswith("not-finite-")]:
        found += f" (to go on from the last, rename it to {bad[-1].removeprefix('not-finite-')})"
    raise ValueError(
        f"{run} has no checkpoint to go on from, and is not begun anew, which would bury what it "
        f"holds: {found}. Choose another folder with --to, or remove this one"
    )


def what_happened(run: Path, kept: Mapping[str, Any] | None) -> list[str]:
    """Lines that were lost or damaged, and losses that were not finite."""
    said = Metrics(run).faults(kept)
    bad = [p.name for p in checkpoint.aside(run / "checkpoints") if p.name.startswith("not-finite")]
    if bad:
        said.append(f"losses were not finite after {', '.join(bad)}, which is left out. {WAY_OUT}")
    return said
