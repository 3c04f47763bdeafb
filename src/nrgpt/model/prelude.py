"""The prelude: ordinary causal layers before the first step.

What they leave is where the steps start, and, if the past is settled, what tokens show to one
another at every step. The layers may be gone through several times (``prelude_loops``): that is
depth without parameters. Or they have no weights at all: a ``shared`` prelude lets the energy block
move the tokens before its cone holds.
"""

from torch import nn

from .block import EnergyBlock, Steps
from .config import ModelConfig
from .step import Extra
from .transformer import ParallelBlock, SequentialBlock, TransformerBlock


class Prelude(nn.ModuleList):
    """``cfg.prelude`` layers. A layer is a block that takes one step, at times ... -2, -1."""

    def __init__(self, cfg: ModelConfig):
        kinds = {"sequential": SequentialBlock, "parallel": ParallelBlock}
        number = cfg.prelude if cfg.block == "nrgpt" else 0
        shared = number if cfg.prelude_block == "shared" else 0
        super().__init__(kinds[cfg.prelude_block](cfg) for _ in range(number - shared))
        self.shared = shared
        """How many layers are the energy block's own."""
        self.loops = cfg.prelude_loops

    def plan(self, block: nn.Module, extra: Extra | None = None) -> list[Steps]:
        """One entry for each passage through a layer; the loops share them."""
        layers: list[Steps] = [layer.plan() for layer in self.layers]
        if self.shared:
            assert isinstance(block, EnergyBlock)
            layers = [block.plan(extra, is_free=True)] * self.shared
        return layers * self.loops

    @property
    def layers(self) -> list[TransformerBlock]:
        return list(self)  # type: ignore[arg-type]

    @property
    def updates(self) -> int:
        """Of the whole prelude; dropout has a mask for each."""
        return self.loops * (self.shared + sum(layer.updates for layer in self.layers))
