"""Losses against compute for three families of models, and what a recurrent step is worth.

    python -m experiments.scaling.fit [FOLDER]

FOLDER has text.jsonl and records.jsonl of the jobs (experiments/settled/run.py), as
experiments.settled.tables reads them. Writes scaling.json, scaling.md and scaling.png there.

*Curves.* L(C) = E + (C / 1e15)^-a * b, with C the FLOPs of training, one E for all families (text
has one entropy) and an a and a b for each. Intervals: all fitted again, many times, with residuals
drawn from those of the fit.

*Worth of a step.* GPTs of one width and 1, 2, 4, ... layers give the loss as a function of layers.
A recurrent model of the same width, on the same tokens, is worth as many layers as the GPT that has
its loss; straight lines in log2(layers) lie between, and nothing is said beyond the last.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from experiments.settled.tables import rows_of
from scipy.optimize import least_squares

from nrgpt.dynamics.figures import new_figure, save
from nrgpt.reproduce.tables import Row, grouped, markdown, write_text

HERE = Path(__file__).parent
FAMILIES = {"gpt": "GPT", "rgpt_parallel": "RGPT-parallel", "settled": "NRGPT, settled"}
UNIT = 1e15
RESAMPLED = 400
TARGET = (1e9, 9e9)
"""Parameters and tokens to look ahead to: a billion, and OpenWebText."""
MODEL_FLOPS = 6 * TARGET[0] * TARGET[1]


class Curves:
    """The fitted curves of some families: E, and for each (a, log b)."""

    def __init__(self, points: Mapping[str, Sequence[tuple[float, float]]]):
        """``points``: (FLOPs, loss) by family."""
        self.names = list(points)
        self.index = np.concatenate([[i] * len(own) for i, own in enumerate(points.values())])
        both = np.array([point for own in points.values() for point in own])
        self.x, self.y = np.log(both[:, 0] / UNIT), both[:, 1]
        self.p = self.fitted(self.y)
        self.residuals = self.y - self.at(self.p)

    def at(self, p: np.ndarray, x: np.ndarray | None = None, family: int | None = None) -> Any:
        x = self.x if x is None else x
        i = self.index if family is None else family
        return p[0] + np.exp(p[2 + 2 * i] - p[1 + 2 * i] * x)

    def fitted(self, y: np.ndarray) -> np.ndarray:
        """E at least 0 and below all losses; exponents from 0 to 1."""
        most = y.min()
        start = np.array([0.6 * most, *([0.1, np.log(0.4 * most)] * len(self.names))])
        low = [0.0, *([0.0, -10.0] * len(self.names))]
        high = [most, *([1.0, 10.0] * len(self.names))]
        return least_squares(lambda p: self.at(p) - y, start, bounds=(low, high)).x

    def resampled(self, number: int = RESAMPLED, seed: int = 0) -> np.ndarray:
        """Parameters fitted to the curve with residuals drawn at random, (number, parameters). The
        fit took some of their freedom, so they are scaled up by what it took."""
        generator = np.random.default_rng(seed)
        free = max(1, len(self.y) - len(self.p))
        residuals = self.residuals * (len(self.y) / free) ** 0.5
        drawn = generator.choice(residuals, (number, len(self.y)))
        return np.stack([self.fitted(self.at(self.p) + own) for own in drawn])


def interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def worth_in_layers(loss: float, by_layers: Mapping[int, float]) -> float | None:
    """How many layers a GPT needs for this loss; None where none of those trained reaches it, or
    the smallest is better."""
    layers = sorted(by_layers)
    losses = [by_layers[number] for number in layers]
    if not min(losses) <= loss <= losses[0]:
        return None
    for (n, left), (m, right) in zip(
        zip(layers, losses, strict=True), zip(layers[1:], losses[1:], strict=False), strict=False
    ):
        if right <= loss <= left:
            share = (left - loss) / max(left - right, 1e-12)
            return float(2 ** (np.log2(n) + share * (np.log2(m) - np.log2(n))))
    return None


def family_of(row: Row) -> str | None:
    """The family of a run for the curves: scale-FAMILY-wWIDTH."""
    kind, _, rest = row["model"].partition("-")
    return rest.rpartition("-")[0] if kind == "scale" else None


def mean_loss(rows: Sequence[Row]) -> float:
    return sum(row["val_loss_full"] for row in rows) / len(rows)


def depth_table(rows: Sequence[Row]) -> tuple[list[list[Any]], list[str]]:
    """What recurrent models are worth in layers: runs named depth-gpt-LAYERS and depth-FAMILY-T."""
    named = [row | {"family": row["model"].rpartition("-")[0]} for row in rows]
    own = [row for row in named if row["family"].startswith("depth-")]
    by_layers = {
        row[0]["steps"]: mean_loss(row)
        for (family, _), row in grouped(own, "family", "steps").items()
        if family == "depth-gpt"
    }
    lines: list[list[Any]] = []
    for (family, steps), some in grouped(own, "family", "steps").items():
        loss, found = mean_loss(some), None
        if family != "depth-gpt":
            found = worth_in_layers(loss, by_layers)
        worth = "-" if found is None else f"{found:.1f}"
        lines.append([family.removeprefix("depth-"), steps, len(some), f"{loss:.3f}", worth])
    return lines, ["model", "layers or steps", "seeds", "loss", "worth in layers"]


def scaling_figure(curves: Curves, ps: np.ndarray) -> Any:
    figure = new_figure(8, 4.5)
    axis = figure.subplots()
    x = np.linspace(curves.x.min() - 0.5, curves.x.max() + 2, 100)
    for i, name in enumerate(curves.names):
        own = curves.index == i
        colour, flops = f"C{i}", np.exp(x) * UNIT
        axis.plot(np.exp(curves.x[own]) * UNIT, curves.y[own], "o", color=colour)
        axis.plot(flops, curves.at(curves.p, x, i), color=colour, label=FAMILIES.get(name, name))
        low, high = np.quantile([curves.at(p, x, i) for p in ps], [0.025, 0.975], axis=0)
        axis.fill_between(flops, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set(xscale="log", xlabel="FLOPs of training", ylabel="validation loss (nats)")
    axis.grid(alpha=0.25, which="both")
    axis.legend(frameon=False)
    return figure


def main(
    folder: Annotated[Path, typer.Argument(help="with text.jsonl and records.jsonl")] = HERE,
) -> None:
    """Losses against compute, and what a recurrent step is worth."""
    rows, _ = rows_of(folder)
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if (family := family_of(row)) is not None:
            points.setdefault(family, []).append((row["training_flops"], row["val_loss_full"]))
    said = "# Scaling\n\n"
    if sum(map(len, points.values())) > 1 + 2 * len(points):
        curves = Curves(points)
        ps, lines = curves.resampled(), []
        ahead = np.log(MODEL_FLOPS / UNIT)
        for i, name in enumerate(curves.names):
            expected = np.array([curves.at(p, ahead, i) for p in ps])
            cells = [
                f"{value:.3f} ({low:.3f} to {high:.3f})"
                for value, (low, high) in (
                    (curves.p[1 + 2 * i], interval(ps[:, 1 + 2 * i])),
                    (curves.at(curves.p, ahead, i), interval(expected)),
                )
            ]
            lines.append([FAMILIES.get(name, name), int((curves.index == i).sum()), *cells])
        low, high = interval(ps[:, 0])
        said += f"E = {curves.p[0]:.3f} ({low:.3f} to {high:.3f}), one for all; 95 % intervals.\n\n"
        headings = ["model", "runs", "exponent a", f"loss at {MODEL_FLOPS:.2g} FLOPs"]
        said += markdown(headings, lines) + "\n"
        save(scaling_figure(curves, ps), folder / "scaling", ("png",))
        found = {"names": curves.names, "p": curves.p.tolist(), "resampled": ps.tolist()}
        (folder / "scaling.json").write_text(json.dumps(found) + "\n")
    lines, headings = depth_table(rows)
    if lines:
        said += "## What a step is worth\n\n" + markdown(headings, lines)
    write_text(folder / "scaling.md", said)


if __name__ == "__main__":
    typer.run(main)
