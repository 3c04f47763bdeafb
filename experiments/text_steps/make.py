"""summary.md from the records here and in ../text: python make.py"""

from pathlib import Path

from nrgpt.reproduce.common import Row, markdown, read_rows, write_text
from nrgpt.train.report import read_metrics

HERE = Path(__file__).parent
TEXT = HERE.parent / "text"


def line(title: str, folder: Path, row: Row) -> list[object]:
    run = folder / "runs" / row["case"]
    on_the_way = [f"{entry['val_loss']:.3f}" for entry in read_metrics(run) if "val_loss" in entry]
    return [
        title,
        row["seed"],
        f"{row['parameters_tied'] / 1e6:.1f}M",
        *on_the_way,
        f"{row['val_loss_full']:.3f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['training_flops']:.2e}",
    ]


def main() -> None:
    lines = [line(f"{row['steps']} steps", HERE, row) for row in read_rows(HERE)]
    for row in read_rows(TEXT):
        if row["model"] == "NRGPT FF2W, as many parameters":
            lines.append(line(f"{row['steps']} steps, an eta for each energy", TEXT, row))
        elif row["model"] == "GPT":
            lines.append(line("GPT", TEXT, row))
    lines.sort(key=lambda cells: cells[1])
    headings = ["", "seed", "parameters, tied", "4.1M tokens", "8.2M", "12.3M", "16.4M",
                "whole split", "tokens/s", "training FLOPs"]  # fmt: skip
    write_text(HERE / "summary.md", markdown(headings, lines))


if __name__ == "__main__":
    main()
