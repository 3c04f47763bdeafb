"""Between NRGPT and RGPT-parallel, in the setting of levers.py: which of the energy's constraints
costs what? Only where attention and feed-forward part are both left as they are is it an NRGPT.

python -m experiments.levers.between [NAME[:SEED] ...]

Appends to between.jsonl; one CPU core, four minutes a row.
"""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from experiments.levers import levers
from torch import Tensor, nn

from experiments import training
from nrgpt.model.block import EnergyBlock
from nrgpt.model.energy import FEEDFORWARD, AttentionEnergy, Readout
from nrgpt.model.energy.feedforward import FF2W
from nrgpt.model.init import RULES, blank, initialise, normal
from nrgpt.model.network import LanguageModel
from nrgpt.model.transformer import Attention, FeedForward


class Beside(nn.Module):
    """eta times the force of one energy, and a part that is no energy's beside it."""

    updates = 1
    replaced: str

    def __init__(self, cfg: Any):
        super().__init__()
        self.own = EnergyBlock(cfg)
        del self.own.energy.terms[self.replaced]
        self.part = Attention(cfg) if self.replaced == "attention" else FeedForward(cfg)


class FreeAttention(Beside):
    """A transformer's attention."""

    replaced = "attention"

    def prepare(self, extra: Any = None) -> Any:
        return self.own.prepare(extra), self.part.joined()

    def forward(self, x: Tensor, t: int, prepared: Any, *_: Any) -> Tensor:
        return self.own(x, t, prepared[0]) + self.part(self.own.norm(x), prepared[1], t, None)


class FreeFeedForward(Beside):
    """A transformer's feed-forward part."""

    replaced = "feedforward"

    def prepare(self, extra: Any = None) -> Any:
        return self.own.prepare(extra), self.part.W_2

    def forward(self, x: Tensor, t: int, prepared: Any, *_: Any) -> Tensor:
        hidden = self.part.sigma(F.linear(self.own.norm(x), self.part.W_1))
        return self.own(x, t, prepared[0]) + F.linear(hidden, prepared[1])


class EtaBeforeFree(FreeFeedForward):
    """eta times the sum of both."""

    def prepare(self, extra: Any = None) -> Any:
        folded = self.own.rate.fold(self.part.W_2, self.own.norm, "feedforward")
        return self.own.prepare(extra), folded


class EtaOnAttention(nn.Module):
    """eta times attention's force alone; the force of the feed-forward energy as it is."""

    updates = 1

    def __init__(self, cfg: Any):
        super().__init__()
        self.own = EnergyBlock(cfg)
        self.term = self.own.energy.terms.pop("feedforward")

    def prepare(self, extra: Any = None) -> Any:
        return self.own.prepare(extra), self.term.readout().weight

    def forward(self, x: Tensor, t: int, prepared: Any, *_: Any) -> Tensor:
        on_z = self.term.force(F.linear(self.own.norm(x), prepared[1]), None)
        return self.own(x, t, prepared[0]) + on_z @ prepared[1]


class WideHeads(EnergyBlock):
    """Heads of rank 48 instead of width / heads."""

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        attention = self.energy.terms["attention"]
        assert isinstance(attention, AttentionEnergy)
        attention.size, attention.beta = 48, 48**-0.5
        attention.queries = attention.written = cfg.heads * attention.size
        attention.W_Q = blank(attention.queries, cfg.width)
        attention.W_K = blank(attention.queries, cfg.width)


class Transposed(FF2W):
    """W_2 of the form of W_1, since both read g: Muon's updates go by a matrix's form."""

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        del self.W_2
        self.W_2_transposed = blank(cfg.hidden, cfg.width)

    def readout(self) -> Readout:
        return Readout(torch.cat([self.W_1, self.W_2_transposed]))


RULES["W_2_transposed"] = normal
FEEDFORWARD["transposed"] = Transposed


def with_block(kind: Any) -> type[LanguageModel]:
    class Other(LanguageModel):
        def __init__(self, cfg: Any):
            super().__init__(cfg)
            self.blocks = nn.ModuleList([kind(cfg)])
            initialise(self, cfg)

    return Other


BETWEEN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "free attention": (FreeAttention, ()),
    "free feed-forward part": (FreeFeedForward, ()),
    "free feed-forward part, eta before it too": (EtaBeforeFree, ()),
    "eta on attention alone": (EtaOnAttention, ()),
    "heads of rank 48": (WideHeads, ()),
    "heads of rank 48, width 88": (WideHeads, ("model.width=88",)),
    "W_2 as W_1 to Muon": (EnergyBlock, ("model.feedforward=transposed",)),
}


def main(runs: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    torch.set_num_threads(1)
    for name, (block, fields) in BETWEEN.items():
        levers.LEVERS[name], levers.OTHER_MODELS[name] = fields, with_block(block)
    wanted = [run.partition(":") for run in runs or BETWEEN]
    training.check_names([name for name, *_ in wanted], BETWEEN)
    for name, _, seed in wanted:
        levers.train(name, int(seed or 0), to="between.jsonl")


if __name__ == "__main__":
    typer.run(main)
