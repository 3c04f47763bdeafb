"""Draw a step of NRGPT beside a layer of a GPT, row by row: docs/block.svg.

    python dev/draw_block.py

Plain SVG without a script, legible on light and dark pages. Rows have the names that the steps of
src/nrgpt/model/step.py have; what differs from the GPT is coloured.
"""

from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUTTER, COLUMN, GAP, ROW, HEIGHT, TOP = 96, 372, 24, 58, 38, 66
GPT, NRGPT = GUTTER, GUTTER + COLUMN + GAP
STYLE = """
  text { font: 14px ui-sans-serif, system-ui, sans-serif; fill: #1c2333; text-anchor: middle }
  .row { text-anchor: end; fill: #555d6b; font-size: 13px }
  .about { fill: #555d6b; font-size: 12px }
  .title { font-size: 17px; font-weight: 600 }
  .math { font: italic 15px Georgia, "Times New Roman", serif }
  rect { fill: #f4f6fb; stroke: #8a8f98 }
  .paper { fill: #fff; stroke: none }
  path { fill: none; stroke: #8a8f98; stroke-width: 1.4 }
  .tip { fill: #8a8f98; stroke: none }
  .new { fill: #fdeee6; stroke: #c2410c }
  .energy { fill: #fff7dc; stroke: #a16207; stroke-dasharray: 5 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8e6e1 } .row, .about { fill: #a2a7b1 }
    rect { fill: #232833 } .paper { fill: #171a20 } .new { fill: #3a2117; stroke: #ff8a5c }
    .energy { fill: #332b12; stroke: #e6b34d }
  }
"""
ROWS = ["state", "norm", "read", "score", "energy", "mix", "write back", "rate", "new state"]
# Cells by row: (row, first half or second or both, kind, formula, words).
LAYER = [
    ("state", "both", "", "x", ""),
    ("norm", "both", "", "g = norm(x)", ""),
    ("read", "left", "", "q, k, v = W_Q g, W_K g, W_V g", ""),
    ("read", "right", "", "h = W_1 g", ""),
    ("score", "left", "", "p = softmax(β q · k)", "of tokens up to itself"),
    ("score", "right", "", "gelu(h)", ""),
    ("mix", "left", "", "Σ p v", "of values"),
    ("write back", "left", "", "W_O", "its own"),
    ("write back", "right", "", "W_2", "its own"),
    ("new state", "both", "", "x + both", ""),
]
STEP = [
    ("state", "both", "", "x", ""),
    ("norm", "both", "", "g = norm(x)", ""),
    ("read", "left", "new", "q, k = W_Q g, W_K g", "no values"),
    ("read", "right", "", "h = W_1 g", ""),
    ("score", "left", "new", "p = softmax(β q · k)", "of tokens before it"),
    ("score", "right", "new", "F '(h)", "F: a potential"),
    (
        "energy",
        "both",
        "energy",
        "E = - Σ log Σ e^{β q · k} / β - Σ F(h)",
        "to look at: the step does without it",
    ),
    ("mix", "left", "new", "Σ p k", "of keys"),
    ("write back", "left", "new", "W_Q^T", "as it read"),
    ("write back", "right", "new", "W_1^T", "as it read"),
    ("rate", "both", "new", "η times the force, which is - ∂E / ∂g", ""),
    ("new state", "both", "", "x - η ∂E / ∂g", ""),
]


def formula(text: str) -> str:
    """With subscripts after _ and superscripts after ^, of one letter or in braces."""
    text = text.replace("-", "\u2212").replace("'", "\u2032")
    parts, i, back = [], 0, 0
    while i < len(text):
        if text[i] not in "_^":
            parts.append(
                f'<tspan dy="{back}">{escape(text[i])}</tspan>' if back else escape(text[i])
            )
            i, back = i + 1, 0
            continue
        up = -6 if text[i] == "^" else 4
        end = text.index("}", i) if text[i + 1] == "{" else i + 1
        inside = text[i + 1 : end + 1].strip("{}")
        parts.append(f'<tspan dy="{up + back}" font-size="11">{escape(inside)}</tspan>')
        i, back = end + 1, -up
    return "".join(parts)


def y_of(row: str) -> int:
    return TOP + ROW * ROWS.index(row)


def box(left: int, row: str, half: str, kind: str, math: str, words: str) -> str:
    width = COLUMN - 40 if half == "both" else (COLUMN - 56) * (2 if half == "left" else 1) // 3
    x = left + 20 + (COLUMN - 40 - width if half == "right" else 0)
    y, middle = y_of(row), x + width / 2
    at = f'x="{middle:.0f}" y="{y + (17 if words else 24)}"'
    lines = f'<text class="math" {at}>{formula(math)}</text>'
    if words:
        lines += f'<text class="about" x="{middle:.0f}" y="{y + 32}">{escape(words)}</text>'
    cls = f' class="{kind}"' if kind else ""
    return f'<rect{cls} x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="6"/>{lines}'


def arrow(x: float, above: str, below: str) -> str:
    y1, y2 = y_of(above) + HEIGHT, y_of(below)
    return (
        f'<path d="M{x:.0f} {y1}V{y2 - 6}"/><path class="tip" d="M{x - 4:.0f} {y2 - 7}h8l-4 7z"/>'
    )


def column(left: int, cells: list[tuple[str, str, str, str, str]], title: str, about: str) -> str:
    """Arrows go from each box to the next ones below it, behind the energy, of which the step needs
    nothing; the state goes past them all."""
    places = {
        "left": left + 20 + (COLUMN - 56) / 3,
        "right": left + COLUMN - 20 - (COLUMN - 56) / 6,
    }
    parts = [
        f'<text class="title" x="{left + COLUMN / 2:.0f}" y="24">{title}</text>'
        f'<text class="about" x="{left + COLUMN / 2:.0f}" y="46">{about}</text>'
    ]
    for half, x in places.items():
        rows = [row for row, where, *_ in cells if where in (half, "both") and row != "energy"]
        parts += [arrow(x, *pair) for pair in pairwise(rows)]
    y1, y2, x = y_of("state") + HEIGHT / 2, y_of("new state") + HEIGHT / 2, left + COLUMN - 20
    parts.append(f'<path d="M{x} {y1:.0f}h13V{y2:.0f}h-7"/>')
    parts.append(f'<path class="tip" d="M{x + 7} {y2 - 4:.0f}v8l-7 -4z"/>')
    parts += [box(left, *cell) for cell in cells]
    return "".join(parts)


def draw() -> str:
    names = "".join(
        f'<text class="row" x="{GUTTER - 8}" y="{y_of(row) + 24}">{row}</text>' for row in ROWS
    )
    layer = column(
        GPT, LAYER, "A layer of a GPT", "as GPT-J has it; one of many, each with its own weights"
    )
    step = column(NRGPT, STEP, "A step of NRGPT", "the same one T times; what differs is coloured")
    width, height = NRGPT + COLUMN + 8, y_of(ROWS[-1]) + HEIGHT + 14
    told = "A step of NRGPT beside a layer of a GPT, part by part; the table below says the same"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{told}"><style>{STYLE}</style>'
        f'<rect class="paper" width="{width}" height="{height}" rx="10"/>'
        f"{names}{layer}{step}</svg>\n"
    )


if __name__ == "__main__":
    path = ROOT / "docs" / "block.svg"
    path.write_text(draw(), encoding="utf-8")
    print(path)
