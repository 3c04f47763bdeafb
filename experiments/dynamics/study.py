"""A study of the dynamics of trained models: python study.py PART RUN... --to FOLDER.

Each part writes a JSON file and figures into the folder, and goes through the runs one by one; what
is finished is on disk if the rest is interrupted. README.md says what the parts ask.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import injection
import meaning
import motion
import places
import readings
import sampling
import steering
import stopping
import torch
import typer
from common import Study

from nrgpt.cli.common import clear_errors

PARTS: dict[str, Callable[[Study], None]] = {
    "energies": motion.energies,
    "certified": motion.certified,
    "adaptive": stopping.adaptive,
    "solvers": stopping.solvers,
    "avoid": steering.avoid,
    "style": steering.style,
    "landscape": places.landscape,
    "meaning": meaning.meaning,
    "sampling": sampling.sampling,
    "readings": readings.readings,
    "injection": injection.injection,
}


@clear_errors
def main(
    part: Annotated[str, typer.Argument(help=f"One of {', '.join(PARTS)}.")],
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    to: Annotated[Path, typer.Option(help="Folder for the results.")],
    tokens: Annotated[
        int | None, typer.Option(help="Validation tokens, where many are taken; default all.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option(help="As small as it goes, to try the script.")] = False,
) -> None:
    """Look at the dynamics of trained models."""
    if part not in PARTS:
        raise typer.BadParameter(f"{part!r}; there are {', '.join(PARTS)}")
    torch.manual_seed(0)
    PARTS[part](Study(tuple(runs), to, device, tokens, quick))


if __name__ == "__main__":
    typer.run(main)
