"""Make a zoo model of a finished run: python dev/add_to_zoo.py RUN NAME "what it is" [FOLDER]

Keeps the last checkpoint's weights, in bfloat16 where that halves a file worth halving, and no
optimiser: the model can be used, not trained on.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from nrgpt.train.checkpoint import save_checkpoint
from nrgpt.train.data import keep_tokenizer
from nrgpt.train.runs import load_run
from nrgpt.zoo import FOLDER

KEPT = 33 * 256 + 1
"""Validation tokens that stay with the model, for figures and certificates without the dataset."""
LARGE = 300_000
"""Bytes of float32 weights from which on they are rounded."""


def main(run: Path, name: str, what: str, folder: Path | str = FOLDER) -> None:
    to = Path(folder) / name
    loaded = load_run(run)
    result = json.loads((run / "result.json").read_text())
    step = result["step"]
    to.mkdir()
    for file in ("config.json", "environment.json", "result.json", "metrics.jsonl"):
        shutil.copy(run / file, to)
    dataset = loaded.dataset()
    keep_tokenizer(to, dataset)
    first = dataset.tokens("val").read(0, KEPT).tolist()
    (to / "val.txt").write_text(dataset.tokenizer.decode(first), encoding="utf-8")
    weights = load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    if sum(weight.nbytes for weight in weights.values()) > LARGE:
        weights = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    state = json.loads((run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())
    state["best"] = {"step": step}
    del state["step"]
    save_checkpoint(to / "checkpoints", step, weights, {}, state)
    about = {"what": what, "parameters": result["parameters"]["total"]}
    (to / "about.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:5])
