"""MkDocs calls these: formulas become MathML, which browsers draw themselves, without a script."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL
)  # as pymdownx.arithmatex leaves them


def on_page_content(text: str, **about: Any) -> str:
    return FORMULA.sub(to_mathml, text)


def to_mathml(found: re.Match[str]) -> str:
    display = "block" if found[2] == "[" else "inline"
    formula = re.sub(r"\\mathbb (\w)", r"\\mathbb{\1}", html.unescape(found[3]))
    drawn = convert(formula, display=display)
    return f'<div class="formula">{drawn}</div>' if display == "block" else drawn
