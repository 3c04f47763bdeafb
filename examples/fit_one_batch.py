"""Fit one batch of text with a small NRGPT, then watch its tokens roll down their energies.

Writes out/energies.png. Takes about half a minute on two CPU cores.
"""

import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import nrgpt

TEXT = """\
Every token has an energy, and every energy has a slope. The slope says where the token would
rather be, and the tokens before it say how steep the slope is. Nobody looks ahead.
"""
STEPS = 12


def fit(model: nrgpt.LanguageModel, idx: Tensor, targets: Tensor, iterations: int = 300) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    for i in range(iterations + 1):
        _, loss = model(idx, targets)
        assert loss is not None
        if i % 50 == 0:
            print(
                f"iteration {i:4d}   loss {loss.item():.4f}   {time.perf_counter() - start:5.1f} s"
            )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


@torch.no_grad()
def energies_over_steps(model: nrgpt.LanguageModel, idx: Tensor) -> dict[str, Tensor]:
    """Each term's energy and ||x||, of the first sequence's tokens: shape (steps + 1, tokens)."""
    rows = []
    for x in model.states(idx[:1], steps=2 * STEPS):
        energies = model.energies(x)
        rows.append({"total": sum(energies.values()), **energies, "size": x.norm(dim=-1)})
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def plot(curves: dict[str, Tensor], path: Path) -> None:
    titles = {
        "total": "energy $E_A$",
        "attention": r"attention $E^{\mathrm{AT}}_A$",
        "feedforward": r"feed-forward $E^{\mathrm{FF}}_A$",
        "size": r"size of the state $\|x_A\|$",
    }
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), constrained_layout=True)
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        tokens = curves[name].shape[1]
        for A in range(tokens):
            colour = plt.colormaps["viridis"](A / tokens)
            axis.plot(curves[name][:, A], color=colour, alpha=0.6, linewidth=0.9)
        axis.axvline(STEPS, color="grey", linestyle=":", linewidth=1)
        axis.set(title=title, xlabel="step $t$ (dotted: as trained)")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    torch.manual_seed(0)
    vocabulary = sorted(set(TEXT))
    text = torch.tensor([vocabulary.index(c) for c in TEXT])
    windows = text.unfold(0, 65, 12)
    cfg = nrgpt.ModelConfig(
        vocab_size=len(vocabulary),
        context=64,
        width=64,
        heads=4,
        steps=STEPS,
        feedforward="memory",
        rate="gamma",
    )
    model = nrgpt.LanguageModel(cfg)
    print(f"{model.parameter_counts().total:,} parameters; {model.certificate()}\n")
    fit(model, windows[:, :-1], windows[:, 1:])
    path = Path("out/energies.png")
    plot(energies_over_steps(model, windows[:, :-1]), path)
    print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
