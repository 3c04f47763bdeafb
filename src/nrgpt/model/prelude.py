"""The prelude: ordinary causal layers before the first step.

What they leave is where the steps start, and, if the past is settled, what tokens show to one
another at every step. The layers may be gone through several times (``prelude_loops``): that is
depth without parameters.
"""

from torch import nn

from .block import Steps
from .config import ModelConfig
from .transformer import ParallelBlock, SequentialBlock, TransformerBlock


class Prelude(nn.ModuleList):
    """``cfg.prelude`` layers. A layer is a block that takes one step, at times ... -2, -1."""

    def __init__(self, cfg: ModelConfig):
        kinds = {"sequential": SequentialBlock, "parallel": ParallelBlock}
        number = cfg.prelude if cfg.block == "nrgpt" else 0
        super().__init__(kinds[cfg.prelude_block](cfg) for _ in range(number))
        self.loops = cfg.prelude_loops

    def plan(self) -> list[Steps]:
        """One entry for each passage through a layer; the loops share them."""
        layers: list[Steps] = [layer.plan() for layer in self.layers]
        return layers * self.loops

    @property
    def layers(self) -> list[TransformerBlock]:
        return list(self)  # type: ignore[arg-type]

    @property
    def updates(self) -> int:
        """Of the whole prelude; dropout has a mask for each."""
        return self.loops * sum(layer.updates for layer in self.layers)
