"""What watching costs, as a multiple of computing the states alone: python trajectory_cost.py."""

import functools
import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import nrgpt

SIZES: dict[str, Any] = {"width": 128, "heads": 4, "steps": 8, "context": 256}


def medians(ways: dict[str, Callable[[], object]], repeats: int = 15) -> dict[str, float]:
    """Seconds, the ways taken in turn so that all meet the same neighbours."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    for vocabulary, batch in ((65, 8), (50_304, 2)):
        model = nrgpt.LanguageModel(nrgpt.ModelConfig(vocab_size=vocabulary, **SIZES)).eval()
        idx = torch.randint(vocabulary, (batch, SIZES["context"]))
        options: dict[str, Any] = {"trajectory": {}, "without energies": {"energies": False}}
        if "readouts" in inspect.signature(nrgpt.trajectory).parameters:
            options["without readouts"] = {"readouts": False}
        ways: dict[str, Callable[[], object]] = {
            "states": lambda: list(model.states(idx)),  # noqa: B023
            "forward pass": lambda: model(idx),  # noqa: B023
        }
        for name, chosen in options.items():
            ways[name] = functools.partial(nrgpt.trajectory, model, idx, **chosen)
        with torch.no_grad():
            found = medians(ways)
        print(f"{batch} x {SIZES['context']} tokens, {vocabulary:,} kinds")
        for name, seconds in found.items():
            print(f"  {name:<17} {1e3 * seconds:6.0f} ms  {seconds / found['states']:5.2f}")


if __name__ == "__main__":
    main()
