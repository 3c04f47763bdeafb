"""Files of questions, as MMLU has them."""

import csv
from pathlib import Path

from nrgpt.evaluate.mmlu import COLUMNS


def write_questions(path: Path, number: int) -> None:
    """Sums, whose answers stand at every place in turn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for i in range(number):
            place = i % 4
            choices = [f"{i + 1 + j - place}" for j in range(4)]
            # Of several lengths: some prompts fit into the context below, and some do not.
            asked = f'What, they "ask{"ed" * (i % 5)}", is {i} + 1?'
            writer.writerow([asked, *choices, place])
