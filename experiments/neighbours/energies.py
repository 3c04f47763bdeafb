"""The sum of all tokens' energies over the steps, in trained models: which of them go down it?

    python -m experiments.neighbours.energies [--out out/neighbours]     # needs the trained runs

Three models with the same energy and as many parameters: an Energy Transformer, one with the cone,
and NRGPT, in which a token does not feel those that look at it.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from nrgpt.dynamics.figures import new_figure, save
from nrgpt.train.data import open_dataset
from nrgpt.train.runs import load_run

HERE = Path(__file__).parent
TITLES = {
    "et": "Energy Transformer",
    "et_cone": "the same, with the cone",
    "nrgpt_scalar_masked": "NRGPT: each its own energy",
}
TEXTS = 16


@torch.no_grad()
def sums(run: Path) -> dict[str, Any]:
    """Of some validation texts with missing tokens, over four times the trained steps."""
    loaded = load_run(run)
    cfg, model = loaded.cfg, loaded.model.double().eval()
    stream = open_dataset(cfg.data, cfg.model.vocab_size).tokens("val")
    idx, _ = stream.batch(seed=0, step=0, size=TEXTS, context=cfg.model.context)
    assert cfg.masking is not None
    idx, _ = cfg.masking(idx, seed=0, step=0)
    states = model.states(idx, steps=4 * cfg.model.steps, dropout=False)
    energy = torch.stack([sum(model.energies(x).values()).sum(-1) for x in states])  # type: ignore[union-attr]
    rises = (energy.diff(dim=0) > 0).double().mean().item()
    return {"trained steps": cfg.model.steps, "sums": energy.T.tolist(), "rises": rises}


def draw(found: dict[str, dict[str, Any]]) -> None:
    figure = new_figure(10, 3.4)
    for axis, (name, title) in zip(figure.subplots(1, len(TITLES)), TITLES.items(), strict=True):
        for line in found[name]["sums"]:
            axis.plot(line, color="C0", linewidth=1, alpha=0.6)
        axis.axvline(found[name]["trained steps"], color="grey", linestyle=":")
        axis.set_title(f"{title}\n{found[name]['rises']:.0%} of steps rise", fontsize=10)
        axis.set_xlabel("step (dotted: as trained)")
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("sum of a text's energies")
    save(figure, HERE / "energies", ("png",))


def main(
    out: Annotated[Path, typer.Option(help="where runs are")] = Path("out/neighbours"),
    plots_only: Annotated[bool, typer.Option(help="draw what is on record")] = False,
) -> None:
    """The sum of all tokens' energies over the steps, in trained models."""
    file = HERE / "energies.json"
    if not plots_only:
        found = {name: sums(out / "runs" / f"{name}-small-s0") for name in TITLES}
        file.write_text(json.dumps(found) + "\n")
    draw(json.loads(file.read_text()))


if __name__ == "__main__":
    typer.run(main)
