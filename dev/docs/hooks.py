"""MkDocs calls these: formulas become MathML, which browsers draw themselves, without a script."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL
)  # as pymdownx.arithmatex leaves them

PRIME = re.compile(r"<msup>(<mi>[^<]*</mi>)<mi>(&#x0203[2-4];)</mi></msup>")
LONG = 40
WIDE = re.compile(r'<p>(<img [^>]*(?:class="wide"|ours-30-steps)[^>]*>)</p>')
SMALL_PRINT = re.compile(r"<p>(<img [^>]*(?:block|descent)\.svg[^>]*>)</p>")


def on_page_markdown(text: str, page: Any, **about: Any) -> str:
    if page.file.src_path == "README.md":  # alone under its tab: room for its commands instead
        page.meta["hide"] = ["navigation"]
    return text


def on_post_page(output: str, **about: Any) -> str:
    """What the theme leaves without a name, a screen reader should be told."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"', 1)


def on_page_content(text: str, **about: Any) -> str:
    # What can be moved sideways must be reached by keyboard, too.
    text = WIDE.sub(r'<p class="wide" tabindex="0">\1</p>', text)
    text = SMALL_PRINT.sub(r'<p class="small-print" tabindex="0">\1</p>', text)
    return FORMULA.sub(to_mathml, text)


def to_mathml(found: re.Match[str]) -> str:
    display = "block" if found[2] == "[" else "inline"
    formula = re.sub(r"\\mathbb (\w)", r"\\mathbb{\1}", html.unescape(found[3]))
    # A prime is raised already: as an exponent it would be raised and shrunk once more.
    drawn = PRIME.sub(
        r"<mrow>\1<mo lspace='0' rspace='0'>\2</mo></mrow>", convert(formula, display=display)
    )
    if display == "block":
        return f'<div class="formula">{drawn}</div>'
    # A browser breaks no formula: a long one must be able to scroll on a narrow screen.
    return f'<span class="formula">{drawn}</span>' if len(formula) > LONG else drawn
