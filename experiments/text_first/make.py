"""summary.md and losses.png from the records and rates/: python -m experiments.text_first.make"""

import json
from pathlib import Path

from nrgpt.dynamics.figures import new_figure, save
from nrgpt.reproduce.records import read
from nrgpt.reproduce.tables import markdown, write_text

HERE = Path(__file__).parent
TITLES = {
    "gpt": "GPT, width 768, 12 layers",
    "nrgpt_ff2w_equal_parameters": "NRGPT FF2W, width 1,792, 6 steps",
}


def main() -> None:
    figure = new_figure(6.4, 4.2)
    axis = figure.subplots()
    lines, records = [], read(HERE)
    for name, title in TITLES.items():
        record = records[f"ours-{name}-s0"]
        files = ("config.json", "result.json", "metrics.jsonl")
        cfg, result, entries = (record.read(file) for file in files)
        tokens = cfg["batch"] * cfg["model"]["context"]
        seen = [(e["step"] * tokens, e["loss"]) for e in entries if "loss" in e]
        axis.plot(*zip(*seen, strict=True), label=title)
        tried = {}
        for file in sorted((HERE / "rates").glob(f"owt_{name}-*.jsonl")):
            last = json.loads(file.read_text().splitlines()[-1])
            tried[file.stem.rsplit("-", 1)[1]] = f"{last['val_loss']:.3f}"
        lines.append(
            [
                title,
                f"{result['parameters']['tied'] / 1e6:.1f}M",
                cfg["optimiser"]["lr"],
                ", ".join(f"{lr}: {loss}" for lr, loss in tried.items()),
                f"{cfg['iterations'] * tokens:,}",
                f"{[e for e in entries if 'val_loss' in e][-1]['val_loss']:.3f}",
                f"{result['val_loss_full']:.3f}",
            ]
        )
    headings = ["model", "parameters, tied", "rate", "after 2.9M tokens, by rate", "tokens",
                "validation, estimate", "validation, whole split"]  # fmt: skip
    write_text(HERE / "summary.md", markdown(headings, lines))
    axis.set(xlabel="tokens", ylabel="training loss (nats)")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    save(figure, HERE / "losses", ("png",))


if __name__ == "__main__":
    main()
