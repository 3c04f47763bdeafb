"""The tokenizer of an export, where nrgpt is installed: a fast tokenizer that names what it does
not know. Elsewhere transformers takes its own class, which says "Missing [UNK] token"."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerFast

from ..data.tokenizer import unknown_part


class NRGPTTokenizer(PreTrainedTokenizerFast):
    def _encode_plus(self, text: Any, text_pair: Any = None, *others: Any, **options: Any) -> Any:
        try:
            return super()._encode_plus(text, text_pair, *others, **options)
        except Exception as error:  # the library raises nothing more precise
            for part in parts((text, text_pair)):
                try:
                    self.backend_tokenizer.encode(part)
                except Exception:
                    raise ValueError(unknown_part(part, self.backend_tokenizer)) from error
            raise


def parts(text: Any) -> Iterator[str]:
    if isinstance(text, str):
        yield text
    elif isinstance(text, list | tuple):
        for each in text:
            yield from parts(each)
