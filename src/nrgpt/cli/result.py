"""The result of a finished training, in a few lines."""

from typing import Any

from rich.table import Table

from ..train.config import TrainConfig


def result_table(cfg: TrainConfig, result: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value")
    for what, value in rows(cfg, result):
        table.add_row(what, value)
    return table


def rows(cfg: TrainConfig, result: dict[str, Any]) -> list[tuple[str, str]]:
    counts = result["parameters"]
    found = [
        ("iterations", f"{result['step']:,}"),
        ("parameters", f"{counts['total']:,}"),
    ]
    if (estimate := result["best_val_loss_estimate"]) is not None:
        found.append(
            ("best estimate", f"{estimate:.4f} nats, at iteration {result['best_step']:,}")
        )
    if "val_loss_full" in result:
        tokens = result["val_loss_full_tokens"]
        found.append(("validation loss", f"{result['val_loss_full']:.4f} nats, {tokens:,} tokens"))
    if "listops" in result:
        score = result["listops"]
        right = f"{100 * score['accuracy']:.2f} % of {score['total']:,}"
        found.append(("ListOps answers", right))
    if result["rollbacks"]:
        found.append(("went back", f"{result['rollbacks']} times, after numbers not finite"))
    return found
