"""Train an NRGPT on ListOps, see how well it does, and watch its tokens roll down their energies.

A few minutes on two CPU cores. Everything is in runs/demo; out/energies.png is the picture. Stop it
whenever you like and start it again: it goes on where it was.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from torch import Tensor

from nrgpt import LanguageModel
from nrgpt.data.listops import read_tests
from nrgpt.evaluate.listops import listops_accuracy
from nrgpt.presets import demo
from nrgpt.runs import load_run
from nrgpt.train.loop import train

screen = Console()


@torch.no_grad()
def energies_over_steps(model: LanguageModel, idx: Tensor, steps: int) -> dict[str, Tensor]:
    """Each term's energy, their sum, and ||x||, of every token: shape (steps + 1, tokens)."""
    rows = []
    for x in model.states(idx, steps=steps):
        energies = model.energies(x)
        rows.append({"total": sum(energies.values()), **energies, "size": x.norm(dim=-1)})
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def plot(curves: dict[str, Tensor], trained_steps: int, path: Path) -> None:
    titles = {
        "total": "energy $E_A$",
        "attention": r"attention $E^{\mathrm{AT}}_A$",
        "feedforward": r"feed-forward $E^{\mathrm{FF}}_A$",
        "size": r"size of the state $\|x_A\|$",
    }
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.6), constrained_layout=True)
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        tokens = curves[name].shape[1]
        for A in range(tokens):
            colour = plt.colormaps["viridis"](A / tokens)
            axis.plot(curves[name][:, A], color=colour, alpha=0.7, linewidth=1)
        axis.axvline(trained_steps, color="grey", linestyle=":", linewidth=1)
        axis.set(title=title, xlabel="step $t$ (dotted: as trained)")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    cfg = demo()
    run = Path("runs/demo")
    result = train(cfg, run)

    loaded = load_run(run)
    dataset = loaded.dataset()
    tests = read_tests(dataset.folder)
    accuracy = listops_accuracy(loaded.model, tests, dataset.tokenizer)
    screen.print(accuracy.table())
    screen.print("Three worked examples (each reduces numbers that training never met together):")
    for example in accuracy.examples[:3]:
        verdict = "right" if example.is_correct else f"wrong, it is {example.answer}"
        screen.print(
            f"  {example.prompt} {example.generated}    ({verdict})",
            highlight=False,
            soft_wrap=True,
        )
    screen.print(
        f"\nvalidation loss {result['val_loss_full']:.4f} nats, "
        f"{loaded.model.parameter_counts().total:,} parameters"
    )
    screen.print(f"certificate: {loaded.model.certificate()}", highlight=False, soft_wrap=True)

    text = torch.from_numpy(dataset.tokens("val").read(0, 64))[None]
    path = Path("out/energies.png")
    steps = 2 * cfg.model.steps
    plot(energies_over_steps(loaded.model, text, steps), cfg.model.steps, path)
    screen.print(f"\nenergies of 64 validation tokens over {steps} steps: {path}")


if __name__ == "__main__":
    main()
