"""summary.md from the records: python -m experiments.text_rates.make"""

from pathlib import Path
from typing import Any

import torch

from nrgpt.check import from_dict
from nrgpt.language_model import LanguageModel
from nrgpt.model.config import ModelConfig
from nrgpt.reproduce.records import read
from nrgpt.reproduce.tables import markdown, write_text

HERE = Path(__file__).parent


def size_of(model: dict[str, Any]) -> int:
    with torch.device("meta"):
        return LanguageModel(from_dict(ModelConfig, model)).parameter_counts().tied


def main() -> None:
    lines = []
    for record in read(HERE).values():
        cfg, metrics = record.read("config.json"), record.read("metrics.jsonl")
        model, own = cfg["model"], cfg["optimiser"]
        is_nrgpt = model["block"] == "nrgpt"
        lines.append(
            [
                model["block"],
                model["width"],
                model["hidden_factor"],
                f"{size_of(model) / 1e6:.1f}M",
                ("Muon" if own["muon_eta"] else "AdamW") if is_nrgpt else "",
                f"{model['alpha_init']:g}" if is_nrgpt else "",
                own["lr"],
                own["muon_lr"],
                f"{metrics[-1]['val_loss']:.3f}",
            ]
        )
    lines.sort(key=lambda line: line[-1])
    headings = ["model", "D", "hidden / D", "parameters, tied", "eta by", "alpha from",
                "AdamW's rate", "Muon's rate", "validation, estimate"]  # fmt: skip
    write_text(HERE / "summary.md", markdown(headings, lines))


if __name__ == "__main__":
    main()
