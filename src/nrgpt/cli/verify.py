"""nrgpt verify."""

import sys
from typing import Annotated

import typer
from typer import Option

from ..train.verify import accept_changes, verify_run
from .common import RunFolder, app


@app.command()
def verify(
    run: RunFolder,
    accept: Annotated[
        bool,
        Option(
            "--accept-changes",
            help="Take configuration, tokenizer and result of a run, or all files of an export, as "
            "they are now: you changed them.",
        ),
    ] = False,
) -> None:
    """Check every file of a run or an export: is it as it was written?

    (For datasets: nrgpt data verify.)
    """
    if accept:
        names = ", ".join(accept_changes(run))
        print(f"accepted as they are now: {names}" if names else "nothing had changed")
    found = list(verify_run(run))
    for name, faults in found:
        print(f"{name}: {'; '.join(faults) if faults else 'as it was written'}")
    if bad := sum(bool(faults) for _, faults in found):
        print(f"nrgpt: {bad} of {len(found)} are not as they were written", file=sys.stderr)
        raise typer.Exit(2)
