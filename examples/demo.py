"""Train an NRGPT on ListOps, see how well it does, and watch its tokens roll down their energies.

A few minutes on two CPU cores. Everything is in runs/demo; out/energies.png is the picture. Stop it
whenever you like and start it again: it goes on where it was.
"""

from pathlib import Path

import torch
from rich.console import Console

import nrgpt
from nrgpt.data.listops import read_tests
from nrgpt.dynamics.figures import energy_figure, save
from nrgpt.measure.listops import listops_accuracy
from nrgpt.train.loop import train
from nrgpt.train.presets import demo
from nrgpt.train.runs import load_run

screen = Console()


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
    save(energy_figure(nrgpt.trajectory(loaded.model, text, steps=steps)), path, ("png",))
    screen.print(f"\nenergies of 64 validation tokens over {steps} steps: {path}")


if __name__ == "__main__":
    main()
