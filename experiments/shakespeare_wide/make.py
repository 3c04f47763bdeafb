"""results.jsonl, summary.md and losses.png from the records.

python -m experiments.shakespeare_wide.make
"""

import json
from pathlib import Path

from experiments.training import of_record

from nrgpt.dynamics.figures import new_figure, save
from nrgpt.reproduce.records import read
from nrgpt.reproduce.tables import markdown, write_text

HERE = Path(__file__).parent
TITLES = {
    "certified-w256": "certified, width 256, 8 heads",
    "ff2w-w256": "FF2W, width 256, 8 heads",
    "certified-w136": "certified, width 136, 4 heads",
    "certified-w136-8heads": "certified, width 136, 8 heads",
    "ff2w-w128-dropout0.1": "FF2W, width 128, 4 heads",
}


def main() -> None:
    rows, lines, records = [], [], read(HERE)
    figure = new_figure(7.2, 4.2)
    axis = figure.subplots()
    for number, (name, title) in enumerate(TITLES.items()):
        cfg, row, curve = of_record(records[name])
        row = {"case": name, "dropout": cfg.model.dropout, **row}
        rows.append(row)
        losses = (f"{row[key]:.4f}" for key in ("val_loss_full", "val_loss", "train_loss"))
        best = f"{row['best_val_loss']:.4f} at {row['best_step']:,}"
        lines.append([title, f"{row['parameters']:,}", cfg.model.dropout, *losses, best])
        steps = [entry["step"] for entry in curve]
        for key, style in (("train_loss", "--"), ("val_loss", "-")):
            label = title if key == "val_loss" else None
            axis.plot(steps, [e[key] for e in curve], style, color=f"C{number}", label=label)
    write_text(HERE / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    headings = ["model", "parameters", "dropout", "validation, whole split",
                "validation, estimate", "training, estimate", "best estimate"]  # fmt: skip
    write_text(HERE / "summary.md", markdown(headings, lines))
    axis.axhline(1.44, color="grey", linestyle=":", label="goal")
    axis.set(xlabel="iteration", ylabel="loss (nats), estimates; training dashed", ylim=(0.9, 1.8))
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
    save(figure, HERE / "losses", ("png",))


if __name__ == "__main__":
    main()
