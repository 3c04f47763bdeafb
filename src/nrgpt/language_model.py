"""The language model: the network, and what one does with it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .decode.generate import generate
from .dynamics.attention import attention_weights
from .dynamics.descent import check_descent
from .model.certificate import Certificate
from .model.network import Network
from .model.step import Extra


class LanguageModel(Network):
    """A network that generates texts and says whether its energy goes down."""

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """The new tokens of each prompt; see nrgpt.decode.generate.generate for the options."""
        return generate(self, prompts, **options)

    def summary(self) -> str:
        """Kind and sizes, in a line."""
        cfg, steps = self.cfg, "layers" if self.cfg.block == "gpt" else "steps"
        return (
            f"{cfg.block}: width {cfg.width}, heads {cfg.heads}, {steps} {cfg.steps}, context "
            f"{cfg.context}, vocabulary {cfg.vocab_size}, "
            f"{self.parameter_counts().total:,} parameters"
        )

    def __repr__(self) -> str:
        return f"LanguageModel({self.summary()})"

    def attention(self, idx: Tensor, **options: Any) -> Tensor:
        """How much each token looks at each earlier one, (steps, batch, heads, tokens, tokens); see
        nrgpt.dynamics.attention.attention_weights."""
        return attention_weights(self, idx, **options)

    def certificate(
        self, extra: Extra | None = None, *, idx: Tensor | None = None, steps: int | None = None
    ) -> Certificate:
        """Is descent guaranteed, at the present weights? If not, which part is to blame? Given
        tokens ``idx``, their energies are followed too, in the forward pass and beside it."""
        found = self.guarantees(extra)
        if idx is None:
            return found
        check = check_descent(self, idx, steps=steps, extra=extra)
        return dataclasses.replace(found, check=check)
