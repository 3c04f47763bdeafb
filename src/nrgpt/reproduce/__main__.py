"""python -m nrgpt.reproduce RUN...: train the runs whose configurations are in these folders, as
one pack. This is how `nrgpt reproduce --processes N` starts its processes."""

import json
from pathlib import Path

import typer

from ..check import from_dict
from ..cli.common import clear_errors
from ..train.config import TrainConfig
from .training import train_pack


@clear_errors
def main(runs: list[Path]) -> None:
    cfgs = [from_dict(TrainConfig, json.loads((run / "config.json").read_text())) for run in runs]
    train_pack(cfgs, runs)


if __name__ == "__main__":
    typer.run(main)
