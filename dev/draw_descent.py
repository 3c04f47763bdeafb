"""The moving picture of the README: letters of a text roll down their energies.

    python dev/draw_descent.py zoo:listops_settled --to docs/descent.svg

An animated SVG of a few kilobytes: browsers and GitHub play it. It keeps still for readers who ask
for less motion, and is legible on light and dark pages.
"""

import argparse
from html import escape
from itertools import pairwise
from pathlib import Path

import torch

import nrgpt
from nrgpt import zoo
from nrgpt.dynamics.figures import token_label, visible
from nrgpt.train.runs import load_run

WIDTH, HEIGHT, TOP, BOTTOM, LEFT = 880, 360, 34, 44, 58
SECONDS, REST = 5.0, 0.35
"""Of one round, and the share of it for which all letters rest at the end."""
STYLE = """
  text { font-family: ui-monospace, Menlo, Consolas, monospace; fill: #8a8f98 }
  .letter { font-size: 22px; font-weight: 600; fill: #c2410c; text-anchor: middle }
  .axis { font: 15px ui-sans-serif, system-ui, sans-serif }
  .trail { stroke: #8a8f98; stroke-opacity: .35 }
  @media (prefers-color-scheme: dark) { .letter { fill: #ff8a5c } }
  @media (prefers-reduced-motion: reduce) { .letter, .trail { animation: none !important } }
"""


def draw(energies: list[list[float]], letters: list[str], title: str) -> str:
    """``energies`` by state and token."""
    steps, count = len(energies) - 1, len(letters)
    low, high = min(map(min, energies)), max(map(max, energies))
    place = (WIDTH - LEFT - 16) / count

    def y(energy: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - energy) / ((high - low) or 1)

    moves = [100 * t / steps * (1 - REST) for t in range(steps + 1)]
    parts, rules = [], []
    for i, letter in enumerate(letters):
        x, ys = LEFT + place * (i + 0.5), [y(state[i]) for state in energies]
        frames = "".join(
            f"{at:.1f}%{{transform:translateY({v - ys[-1]:.1f}px)}}"
            for at, v in zip(moves, ys, strict=True)
        )
        rules.append(
            f"@keyframes l{i}{{{frames}}}.l{i}{{animation:l{i} {SECONDS}s linear infinite}}"
        )
        parts.append(f'<path class="trail" d="M{x:.1f} {ys[0]:.1f}V{ys[-1]:.1f}"/>')
        parts.append(
            f'<text class="letter l{i}" x="{x:.1f}" y="{ys[-1] + 7:.1f}">{escape(letter)}</text>'
        )
    axis = [
        f'<text class="axis" x="4" y="20">energy</text><text class="axis" x="{LEFT - 8}" '
        f'y="{y(v) + 4:.1f}" text-anchor="end">{v:.0f}</text>'
        for v in (high, low)
    ]
    foot = f'<text class="axis" x="{LEFT}" y="{HEIGHT - 12}">{escape(title)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}{"".join(rules)}</style>'
        f"{''.join(axis)}{''.join(parts)}{foot}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--text", default="max(4,median(1,5,3),2) = max(4,3,2) = 4")
    parser.add_argument("--to", type=Path, default=Path("docs/descent.svg"))
    given = parser.parse_args()
    loaded = load_run(zoo.resolve(given.run))
    model, label = loaded.model.double(), token_label(loaded.tokenizer)
    certificate = model.certificate()
    idx = torch.tensor([loaded.encode(given.text)])
    energies = settled_energies(model, idx)
    rises = sum(
        b > a + 1e-9 * abs(a) for s, r in pairwise(energies) for a, b in zip(s, r, strict=True)
    )
    steps = idx.numel() * (len(energies) - 1)
    title = f"{certificate.title}; here {rises} of {steps} steps raise one"
    names = [visible(label(token)) for token in idx[0].tolist()]
    letters = [name.lstrip("␣") or name for name in names]
    given.to.write_text(draw(energies, letters, title), encoding="utf-8")
    print(f"{given.to}: {given.to.stat().st_size:,} bytes. {title}")


def settled_energies(model: nrgpt.LanguageModel, idx: torch.Tensor) -> list[list[float]]:
    """Of each token while its past stands still, as the certificate has it."""
    from nrgpt.dynamics.field import Field

    with torch.no_grad():
        start = model.begin(idx)
        past = None if model.is_settled else model.last_state(idx, dropout=False)
        rolled = Field(model, start, past=past).roll(start, model.cfg.steps + 1)
        return [look.energy[0].tolist() for _, look in rolled]


if __name__ == "__main__":
    main()
