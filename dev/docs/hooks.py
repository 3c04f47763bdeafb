"""MkDocs calls these: formulas become MathML, which browsers draw themselves, without a script."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL
)  # as pymdownx.arithmatex leaves them

LONG = 40


def on_page_content(text: str, **about: Any) -> str:
    return FORMULA.sub(to_mathml, text)


def to_mathml(found: re.Match[str]) -> str:
    display = "block" if found[2] == "[" else "inline"
    formula = re.sub(r"\\mathbb (\w)", r"\\mathbb{\1}", html.unescape(found[3]))
    drawn = convert(formula, display=display)
    if display == "block":
        return f'<div class="formula">{drawn}</div>'
    # A browser breaks no formula: a long one must be able to scroll on a narrow screen.
    return f'<span class="formula">{drawn}</span>' if len(formula) > LONG else drawn
