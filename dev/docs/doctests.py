"""mkdocstrings calls this: examples in docstrings become code, not quotations of quotations."""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(Extension):
    def on_object(self, *, obj: Object, **about: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Examples reach from the first >>> to an empty line."""
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
