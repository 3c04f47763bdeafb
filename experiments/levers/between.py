"""Between NRGPT and RGPT-parallel, in the setting of levers.py: which of the energy's constraints
costs what? Only where attention and feed-forward part are both left as they are is it an NRGPT.

python -m experiments.levers.between [NAME[:SEED] ...]

Appends to between.jsonl; one CPU core, four minutes a row.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from experiments.levers import levers
from torch import Tensor, nn

from experiments import training
from nrgpt.kernels.pointwise import ACTIVATIONS
from nrgpt.language_model import LanguageModel
from nrgpt.model.block import Block, EnergyBlock
from nrgpt.model.energy import AttentionEnergy, Readout, register
from nrgpt.model.energy.feedforward import FF2W
from nrgpt.model.init import initialise, normal, parameter
from nrgpt.model.past import WholeText
from nrgpt.model.step import Plan
from nrgpt.model.transformer import Attention, FeedForward


class Summed(NamedTuple):
    """An energy's steps, and something of g that is added to each."""

    plan: Plan
    other: Callable[[Tensor], Tensor]

    def move(self, x: Tensor, t: int, memory: None = None, masks: None = None) -> Tensor:
        return self.plan.move(x, t) + self.other(self.plan.normalise(x))


class FreeAttention(Block):
    """A transformer's attention beside eta times the force of the feed-forward energy."""

    updates = 1

    def __init__(self, cfg: Any):
        super().__init__()
        self.own = EnergyBlock(cfg)
        del self.own.energy.terms["attention"]
        self.part = Attention(cfg)

    def plan(self, extra: Any = None, **options: Any) -> Summed:
        joined = self.part.joined()
        return Summed(self.own.plan(extra), lambda g: self.part(g, joined, 0, None))


class FreeFeedForward(Block):
    """A transformer's feed-forward part beside eta times attention's force."""

    updates = 1

    def __init__(self, cfg: Any):
        super().__init__()
        self.own = EnergyBlock(cfg)
        del self.own.energy.terms["feedforward"]
        self.part = FeedForward(cfg)

    def write(self) -> Tensor:
        return self.part.W_2

    def plan(self, extra: Any = None, **options: Any) -> Summed:
        W_1, W_2 = self.part.W_1, self.write()
        sigma = ACTIVATIONS[self.part.activation].value
        return Summed(self.own.plan(extra), lambda g: F.linear(sigma(F.linear(g, W_1)), W_2))


class EtaBeforeFree(FreeFeedForward):
    """eta times the sum of both."""

    def write(self) -> Tensor:
        return self.own.rate.fold(self.part.W_2, self.own.norm, "feedforward")


class EtaOnAttention(Block):
    """eta times attention's force alone; the force of the feed-forward energy as it is."""

    updates = 1

    def __init__(self, cfg: Any):
        super().__init__()
        self.own = EnergyBlock(cfg)
        self.term = self.own.energy.terms.pop("feedforward")

    def plan(self, extra: Any = None, **options: Any) -> Summed:
        term, readout = self.term, self.term.readout()
        past = WholeText(None, None)
        return Summed(self.own.plan(extra), lambda g: readout.on_g(term.force(readout.z(g), past)))


class WideHeads(EnergyBlock):
    """Heads of rank 48 instead of width / heads."""

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        attention = self.terms["attention"]
        assert isinstance(attention, AttentionEnergy)
        attention.size, attention.beta = 48, 48**-0.5
        attention.queries = rows = cfg.heads * attention.size
        attention.W_Q = parameter(rows, cfg.width, start=normal, muon="matrix")
        attention.W_K = parameter(rows, cfg.width, start=normal, muon="matrix")


class Transposed(FF2W):
    """W_2 of the form of W_1, since both read g: Muon's updates go by a matrix's form."""

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        del self.W_2
        self.W_2_transposed = parameter(cfg.hidden, cfg.width, start=normal, muon="matrix")

    def readout(self) -> Readout:
        return Readout(torch.cat([self.W_1, self.W_2_transposed]))


register("transposed", Transposed)


def with_block(kind: Any) -> type[LanguageModel]:
    class Other(LanguageModel):
        def __init__(self, cfg: Any):
            super().__init__(cfg)
            self.blocks = nn.ModuleList([kind(cfg)])
            self.for_muon = initialise(self, cfg)

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
