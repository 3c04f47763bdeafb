"""Figures of a trajectory: energies over the steps, where they rise and fall, and what the model
would say if it stopped there.

Each function returns a matplotlib Figure of one sample of the batch; ``save`` writes it as PNG and
PDF. ``label`` turns a token's number into its text.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.tokenizer import Tokenizer
from ..extras import need
from ..model.network import IGNORED_TARGET
from .trajectory import Trajectory, energy_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Label = Callable[[int], str]

COLOURS = {"right": "Blues", "wrong": "Oranges", "no target": "Greys"}
"""Colour maps of what the model would say."""
DEEPEST = 0.85
"""How far up a colour map probability 1 goes, so that text on it stays readable."""
BAND = 32
"""Tokens side by side in the readout figure; further ones go into bands below."""
ROWS = 26
"""States in a band of the readout figure; of more, only so many are shown."""
AS_TRAINED: dict[str, Any] = {"color": "black", "linestyle": ":", "linewidth": 1.2}
"""The line at the trained number of steps."""


def new_figure(width: float, height: float) -> "Figure":
    """Without pyplot, which would set a backend and keep figures open."""
    made = need("matplotlib.figure", "a figure", "plot")
    return made.Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path, formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write ``path`` with each suffix; returns the files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(f".{ending}") for ending in formats]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # texts may hold any character
        for file in files:
            figure.savefig(file, dpi=130)
    return files


def write_figures(seen: Trajectory, folder: Path, label: Label = str) -> list[Path]:
    """Write all figures that the trajectory has data for, as PNG and PDF; returns the files."""
    figures = {"energies": energy_figure(seen)}
    if seen.top_tokens is not None:
        figures["readout"] = readout_figure(seen, label)
    if seen.energies:
        figures["heatmap"] = heatmap_figure(seen, label)
    return [file for name, figure in figures.items() for file in save(figure, folder / name)]


def token_label(tokenizer: Tokenizer) -> Label:
    """Texts by number. A model may have more tokens than its tokenizer: these are called #n."""
    return lambda n: tokenizer.decode([n]) if n < tokenizer.vocab_size else f"#{n}"


def visible(text: str, length: int = 8) -> str:
    """A token's text with its white space made visible, cut if it is long."""
    body = text.lstrip(" ")
    shown = "␣" * (len(text) - len(body)) + body
    shown = shown.translate({10: "↵", 13: "↵", 9: "⇥"})
    shown = "".join(c if c.isprintable() else "\ufffd" for c in shown)
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def energy_title(term: str) -> str:
    return energy_name(term).replace("$", r"\$")


def energy_figure(seen: Trajectory, *, sample: int = 0, tokens: int = 64) -> "Figure":
    """Energies of the first ``tokens`` tokens over the steps, as in the paper, and ||x|| beside
    them. Without energies: ||x||, and how far g moves."""
    panels = {energy_title(term): energy for term, energy in seen.energies.items()}
    panels[r"size of the state $\|x_A\|$"] = seen.size
    if not seen.energies:
        panels[r"movement $\|\Delta g_A\|$"] = seen.move
    figure = new_figure(3.4 * len(panels) + 0.7, 3.5)
    from matplotlib.collections import LineCollection
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        curves = values[:, sample, :tokens].double().numpy()
        t = np.arange(seen.steps + 1 - len(curves), seen.steps + 1)
        points = [np.column_stack([t, curve]) for curve in curves.T]
        position = np.arange(len(points))
        lines = LineCollection(points, array=position, cmap="viridis", linewidths=1, alpha=0.7)
        axis.add_collection(lines)
        axis.plot(t, curves.mean(1), color="black", linewidth=2, label="mean")
        axis.autoscale_view()
        axis.axvline(seen.trained_steps, **AS_TRAINED)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step $t$ (dotted: as trained)")
    axes[0].legend(loc="best", frameon=False, fontsize=9)
    figure.colorbar(lines, ax=axes, label="position $A$", pad=0.01, aspect=30)
    return figure


def heatmap_figure(
    seen: Trajectory, label: Label = str, *, term: str = "total", sample: int = 0, tokens: int = 64
) -> "Figure":
    """How much each step changes each token's energy. The colours are linear near zero and
    logarithmic further out, so that small late changes show beside large early ones."""
    if term not in seen.energies:
        there = ", ".join(seen.energies) or "none: it was made with energies=False"
        raise ValueError(f"term = {term!r}: the energies of this trajectory are {there}")
    change = np.diff(seen.energies[term][:, sample, :tokens].double().numpy(), axis=0)
    steps, count = change.shape
    figure = new_figure(max(6.0, 0.19 * count + 2.2), min(8.0, 0.22 * steps + 1.6))
    from matplotlib.colors import AsinhNorm
    from matplotlib.ticker import MaxNLocator

    axis = figure.subplots()
    largest = float(np.nanmax(np.abs(change), initial=0.0)) or 1.0
    norm = AsinhNorm(largest / 30, vmin=-largest, vmax=largest)
    edges = np.arange(count + 1) - 0.5, np.arange(steps + 1)
    image = axis.pcolormesh(*edges, change, norm=norm, cmap="RdBu_r")
    if seen.trained_steps < steps:
        axis.axhline(seen.trained_steps, **AS_TRAINED)
    axis.invert_yaxis()
    axis.yaxis.set_major_locator(MaxNLocator(10, integer=True))
    axis.set_ylabel("step $t$ (dotted: as trained)")
    write_tokens(axis, [label(token) for token in seen.idx[sample, :tokens].tolist()], rotation=90)
    axis.set_title(f"change of {energy_title(term)} in each step, token by token", fontsize=11)
    ticks = [largest * share for share in (-1, -0.3, -0.1, -0.03, 0, 0.03, 0.1, 0.3, 1)]
    bar = figure.colorbar(image, ax=axis, label="falls (blue), rises (red)", pad=0.01)
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks], fontsize=8)
    bar.minorticks_off()
    return figure


def write_tokens(axis: "Axes", texts: Sequence[str], *, rotation: float = 0) -> None:
    """Tokens along the x axis, taken literally: a $ does not begin a formula."""
    shown = [visible(text) for text in texts]
    axis.set_xticks(np.arange(len(shown)), shown, rotation=rotation)
    for tick, token in zip(axis.xaxis.get_major_ticks(), shown, strict=True):
        for text in (tick.label1, tick.label2):  # below the axis, and above it
            text.set_parse_math(False)
            text.set_fontsize(8 if rotation else fitting(token))
    axis.tick_params(axis="x", length=0)


def fitting(text: str) -> float:
    """The font size at which a token fits into its column of the readout figure."""
    return min(8.0, 42 / max(1, len(text)))


def readout_figure(
    seen: Trajectory, label: Label = str, *, sample: int = 0, tokens: int = 64
) -> "Figure":
    """What the model would say after each token if it stopped at each step: the likeliest next
    token, darker the likelier it is, in blue where it is right and in orange where it is wrong."""
    count = min(tokens, seen.idx.shape[1])
    states = shown_states(seen)
    bands = [range(start, min(start + BAND, count)) for start in range(0, count, BAND)]
    width, height = 0.4 * min(count, BAND) + 2.4, len(bands) * (0.2 * len(states) + 1.1)
    figure = new_figure(width, height)
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap

    axes = list(figure.subplots(len(bands), 1, squeeze=False)[:, 0])
    kinds: set[str] = set()
    for axis, band in zip(axes, bands, strict=True):
        kinds |= draw_band(axis, seen, label, sample, states, slice(band.start, band.stop))
        axis.set_xlim(-0.5, min(count, BAND) - 0.5)  # cells are equally wide in a shorter band
    figure.suptitle("the likeliest next token after each step", fontsize=11)
    for kind, colourmap in COLOURS.items():
        if kind in kinds:
            shades = ListedColormap(colormaps[colourmap](np.linspace(0, DEEPEST, 256)))
            scale = ScalarMappable(cmap=shades)
            bar = figure.colorbar(scale, ax=axes, pad=0.01, fraction=0.02, aspect=6 * height)
            bar.set_label(f"probability ({kind})", fontsize=8)
            bar.ax.tick_params(labelsize=7)
    return figure


def shown_states(seen: Trajectory) -> list[int]:
    """All states, or evenly spaced ones, with the first, the trained and the last among them."""
    chosen = set(np.linspace(0, seen.steps, min(ROWS, seen.steps + 1)).round().astype(int).tolist())
    return sorted(chosen | {min(seen.trained_steps, seen.steps)})


def draw_band(
    axis: "Axes", seen: Trajectory, label: Label, sample: int, states: list[int], part: slice
) -> set[str]:
    """One band of tokens; returns which of COLOURS are in it."""
    from matplotlib import colormaps

    said = seen.argmax[states, sample, part].numpy()
    p = seen.said()[1][states, sample, part, 0].double().numpy()
    kinds = np.full(said.shape, "no target", dtype=object)
    if seen.targets is not None:
        targets = seen.targets[sample, part].numpy()
        kinds[:, targets != IGNORED_TARGET] = "wrong"
        kinds[said == targets] = "right"
    colours = np.empty((*said.shape, 4))
    for kind, colourmap in COLOURS.items():
        colours[kinds == kind] = colormaps[colourmap](DEEPEST * p[kinds == kind])
    axis.imshow(colours, aspect="auto", interpolation="nearest")
    for (row, column), token in np.ndenumerate(said):
        text, colour = visible(label(int(token))), "white" if p[row, column] > 0.7 else "black"
        cell = axis.text(column, row, text, ha="center", va="center_baseline", color=colour)
        cell.set(fontsize=fitting(text), parse_math=False)
    rows = axis.set_yticks(np.arange(len(states)), [str(t) for t in states], fontsize=8)
    for t, tick in zip(states, rows, strict=True):
        tick.label1.set_fontweight("bold" if t == seen.trained_steps else "normal")
    axis.set_ylabel("step (bold: as trained)", fontsize=8)
    write_tokens(axis, [label(token) for token in seen.idx[sample, part].tolist()])
    axis.tick_params(axis="both", length=0, top=True, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)
    return set(kinds.flat)
