"""results.jsonl, summary.md and losses.png from the records.

python -m experiments.shakespeare_small.make
"""

import json
import statistics
from pathlib import Path

from experiments.training import of_record

from nrgpt.dynamics.figures import new_figure, save
from nrgpt.reproduce.records import read
from nrgpt.reproduce.tables import markdown, spread, write_text

HERE = Path(__file__).parent
ESTIMATES = {"train_loss": "training", "val_loss": "validation"}


def main() -> None:
    rows, curves = [], []
    for name, record in read(HERE).items():
        _, row, curve = of_record(record)
        rows.append({"case": name, **row, "packed": 5})
        curves.append(curve)
    write_text(HERE / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    names = ("val_loss_full", "val_loss", "train_loss", "best_step")
    losses = names[:3]
    lines = [
        [row["seed"], *(f"{row[name]:.4f}" for name in losses), f"{row['best_step']:,}"]
        for row in rows
    ]
    summary = [spread([row[name] for row in rows]) for name in losses]
    lines.append(["mean ± sd", *summary, ""])
    headings = ["seed", "validation, whole split", "validation, estimate", "training, estimate"]
    write_text(HERE / "summary.md", markdown([*headings, "best at"], lines))

    figure = new_figure(6.4, 4)
    axis = figure.subplots()
    for name, style in (("train_loss", "--"), ("val_loss", "-")):
        steps = [entry["step"] for entry in curves[0]]
        for curve in curves:
            axis.plot(steps, [entry[name] for entry in curve], style, color="C1", alpha=0.25)
        mean = [statistics.fmean(e[name] for e in at) for at in zip(*curves, strict=True)]
        axis.plot(steps, mean, style, color="C1", label=f"{ESTIMATES[name]}, mean of {len(rows)}")
    axis.axhline(1.47, color="grey", linestyle=":", label="goal")
    axis.set(xlabel="iteration", ylabel="loss (nats), estimates", ylim=(1.1, 1.8))
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    save(figure, HERE / "losses", ("png",))


if __name__ == "__main__":
    main()
