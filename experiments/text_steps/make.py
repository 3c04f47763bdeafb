"""summary.md from the records here and in ../text: python -m experiments.text_steps.make"""

from pathlib import Path

from nrgpt.reproduce.common import read_rows
from nrgpt.reproduce.records import Record, read
from nrgpt.reproduce.tables import Row, markdown, write_text

HERE = Path(__file__).parent
TEXT = HERE.parent / "text"
TWO = "NRGPT, {steps} steps, an eta for each energy"
ONE = "NRGPT, {steps} steps"
RGPT = "RGPT-parallel, {steps} steps"

TABLES = {
    "As many parameters as GPT": {
        "4_steps": ONE,
        "6_steps": ONE,
        "8_steps": ONE,
        "12_steps": ONE,
        "6_steps_two_etas": TWO,
        "ours-nrgpt_ff2w_equal_parameters": TWO,
        "ours-rgpt_parallel_equal_parameters": RGPT,
        "rgpt_parallel_12_steps": RGPT,
        "ours-gpt": "GPT",
    },
    "Width 768": {
        "width_768_one_eta": ONE,
        "ours-nrgpt_ff2w": TWO,
        "certified_768": "NRGPT, {steps} steps, certified",
        "ours-rgpt_parallel": RGPT,
        "ours-gpt": "GPT",
    },
}


def line(title: str, record: Record, row: Row) -> list[object]:
    entries = record.read("metrics.jsonl")
    on_the_way = [f"{entry['val_loss']:.3f}" for entry in entries if "val_loss" in entry]
    return [
        title.format(**row),
        row["seed"],
        f"{row['parameters_tied'] / 1e6:.1f}M",
        *on_the_way,
        f"{row['val_loss_full']:.3f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['training_flops']:.2e}",
    ]


def main() -> None:
    records = read(HERE) | read(TEXT)
    rows = {row["case"]: row for folder in (HERE, TEXT) for row in read_rows(folder)}
    headings = ["", "seed", "parameters, tied", "4.1M tokens", "8.2M", "12.3M", "16.4M",
                "whole split", "tokens/s", "training FLOPs"]  # fmt: skip
    said = ""
    for title, names in TABLES.items():
        lines = [
            line(name, records[f"{case}-s{seed}"], rows[f"{case}-s{seed}"])
            for seed in (0, 1)
            for case, name in names.items()
            if f"{case}-s{seed}" in rows
        ]
        said += f"{title}:\n\n{markdown(headings, lines)}\n"
    write_text(HERE / "summary.md", said)


if __name__ == "__main__":
    main()
