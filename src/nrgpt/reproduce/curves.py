"""The figure of losses on text: against tokens, FLOPs and seconds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..dynamics.figures import new_figure
from .tables import Row


def curves(
    rows: Sequence[Row], metrics: Mapping[str, Sequence[Row]], colours: Mapping[str, str]
) -> Any:
    """``metrics`` are the lines of each case, with seconds. Above: losses against tokens, FLOPs and
    seconds; estimates on validation data, and faintly the losses of the batches, which are the same
    for all models. Below: the end of it, on an axis that shows differences of 0.02; diamonds are
    losses on the whole split."""
    figure = new_figure(13, 8)
    from matplotlib.ticker import MultipleLocator

    axes = figure.subplots(2, 3, sharex="col", sharey="row")
    labelled: set[str] = set()
    ends: list[tuple[Row, list[float]]] = []
    for row in rows:
        if "error" in row:
            continue
        entries = metrics[row["case"]]
        style = "--" if "as many" in row["model"] else "-"
        for key, look in (
            ("val_loss", {"marker": "o", "markersize": 3}),
            ("loss", {"alpha": 0.3, "linewidth": 0.8}),
        ):
            own = [entry for entry in entries if key in entry]
            shares = np.array([entry["step"] / row["iterations"] for entry in own])
            seconds = np.array([entry["seconds"] for entry in own])
            xs = (shares * row["tokens"], shares * row["training_flops"], seconds)
            losses = [entry[key] for entry in own]
            label = None
            if key == "val_loss":
                label = row["model"] if row["model"] not in labelled else None
                labelled.add(row["model"])
                ends.append((row, [x[-1] for x in xs]))
            for above, below, x in zip(*axes, xs, strict=True):
                drawn = {"color": colours[row["model"]], **look}
                above.plot(x, losses, style, label=label, **drawn)
                if key == "val_loss":
                    below.plot(x, losses, style, **drawn)
    for row, at in ends:
        for axis, x in zip(axes[1], at, strict=True):
            axis.plot(x, row["val_loss_full"], "D", color=colours[row["model"]], markersize=5)
    losses = [loss for line in axes[0, 0].lines for loss in line.get_ydata()]
    if losses:  # without limits, the first updates (11 nats) would take up all the room
        axes[0, 0].set_ylim(min(losses) - 0.1, min(losses) + 3)
    if ends:
        least = min(row["val_loss_full"] for row, _ in ends)
        axes[1, 0].set_ylim(least - 0.02, least + 0.25)
    names = ("tokens", "FLOPs of training", "seconds of training")
    for above, below, name in zip(*axes, names, strict=True):
        below.set(xlabel=name)
        below.yaxis.set_minor_locator(MultipleLocator(0.02))
        above.grid(alpha=0.25)
        below.grid(alpha=0.25, which="both")
    axes[0, 0].set_ylabel("loss (nats; faint: of the batches)")
    axes[1, 0].set_ylabel("the end (diamonds: whole split)")
    if labelled:
        axes[0, 0].legend(frameon=False)
    return figure
