"""Draw the layers of the package, as import-linter checks them: docs/layers.svg.

    python dev/draw_layers.py

Boxes are packages, one row a layer. A line is an import from a package to one below it, the thicker
the more modules import; what follows from other lines is left out.
"""

import tomllib
from collections import Counter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
WIDTH, ROW, BOX, HEIGHT = 880, 66, 132, 34
ABOUT = {
    "__main__": "python -m nrgpt",
    "cli": "the command line",
    "reproduce": "figures and tables",
    "bench": "speed and memory",
    "zoo": "trained models",
    "evaluate": "lm-eval, texts",
    "hf": "Hugging Face",
    "serve": "an HTTP server",
    "text_model": "models used with text",
    "train": "the trainer, runs",
    "measure": "losses, accuracy",
    "interop": "models from elsewhere",
    "language_model": "what one does with it",
    "dynamics": "energies over steps",
    "decode": "continuing texts",
    "explore": "a page to watch",
    "model": "energies, one step",
    "kernels": "fast operations",
    "data": "tokens",
    "check": "values",
    "extras": "optional packages",
    "files": "whole files",
}


def layers() -> list[list[str]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    house = settings["tool"]["importlinter"]["contracts"][0]
    return [row.split(" | ") for row in house["layers"]]


def imports() -> Counter[tuple[str, str]]:
    """How many modules of a package import another."""
    graph = grimp.build_graph("nrgpt", cache_dir=None)
    found: Counter[tuple[str, str]] = Counter()
    for module in graph.modules:
        package = module.split(".")[1:2]
        targets = {
            other.split(".")[1]
            for other in graph.find_modules_directly_imported_by(module)
            if "." in other
        }
        found.update((package[0], target) for target in targets - {*package} if package)
    return found


def reduced(found: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Without imports of what is reached through another package anyway."""
    below: dict[str, set[str]] = {}
    for source, target in found:
        below.setdefault(source, set()).add(target)

    def reached(package: str) -> set[str]:
        return set().union(*({t} | reached(t) for t in below.get(package, ())), set())

    return Counter(
        {
            (source, target): count
            for (source, target), count in found.items()
            if not any(target in reached(other) for other in below[source] - {target})
        }
    )


def draw() -> str:
    rows = layers()
    places = {
        name: (WIDTH * (i + 1) / (len(row) + 1), 24 + ROW * level)
        for level, row in enumerate(rows)
        for i, name in enumerate(row)
    }
    lines, boxes = [], []
    for (source, target), count in sorted(reduced(imports()).items()):
        if source not in places or target not in places:
            continue
        (x1, y1), (x2, y2) = places[source], places[target]
        y1, y2 = y1 + HEIGHT / 2, y2 - HEIGHT / 2
        bend = (x2 - x1) / 2 + 40 * ((y2 - y1) > ROW) * (1 if x1 <= WIDTH / 2 else -1) * -1
        lines.append(
            f'<path d="M{x1:.0f} {y1:.0f} C{x1 + bend:.0f} {(y1 + y2) / 2:.0f} '
            f'{x1 + bend:.0f} {(y1 + y2) / 2:.0f} {x2:.0f} {y2:.0f}" '
            f'stroke-width="{0.6 + 0.25 * count:.2f}"/>'
        )
    for name, (x, y) in places.items():
        boxes.append(
            f'<rect x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" '
            f'height="{HEIGHT}" rx="5"/><text x="{x:.0f}" y="{y - 2:.0f}">{name}</text>'
            f'<text class="about" x="{x:.0f}" y="{y + 11:.0f}">{ABOUT[name]}</text>'
        )
    height = ROW * len(rows)
    style = (
        "path{fill:none;stroke:#8a8f98;opacity:.55}rect{fill:#f4f6fb;stroke:#3b5bdb}"
        "text{font:600 12px system-ui,sans-serif;text-anchor:middle;fill:#1c2333}"
        ".about{font-weight:400;font-size:9.5px;fill:#555d6b}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="Layers of the package nrgpt: each imports from those below it">'
        f"<style>{style}</style>{''.join(lines)}{''.join(boxes)}</svg>\n"
    )


if __name__ == "__main__":
    path = ROOT / "docs" / "layers.svg"
    path.write_text(draw())
    print(path)
