"""Energies per token: the contract of a term, the terms, and where they are found by name."""

from collections.abc import Callable

from torch import nn

from ..config import ModelConfig
from ..registry import ENERGIES
from .attention import AttentionEnergy
from .feedforward import FF1, FF2, FF2W, DenseMemory
from .term import EnergyTerm, Readout

__all__ = ["ENERGIES", "AttentionEnergy", "EnergyTerm", "Readout", "register"]

ENERGIES.update(attention=AttentionEnergy, ff1=FF1, ff2w=FF2W, ff2=FF2, memory=DenseMemory)


def register(name: str, energy: Callable[[ModelConfig], EnergyTerm]) -> None:
    """Let configurations name an energy of your own: a class, or a function, of a ModelConfig.

    >>> import nrgpt
    >>> class Bowl(nrgpt.EnergyTerm):
    ...     def __init__(self, cfg):
    ...         super().__init__()
    ...         self.width = nrgpt.parameter(cfg.width, start=nrgpt.ones)
    ...     def energy(self, z, past):
    ...         return (self.width * z.square()).sum(-1) / 2
    >>> nrgpt.register("bowl", Bowl)
    >>> cfg = nrgpt.ModelConfig(vocab_size=9, context=8, width=16, heads=2, steps=2,
    ...     terms=("attention", "feedforward", "bowl"))
    >>> sorted(nrgpt.LanguageModel(cfg).energy_block.terms)
    ['attention', 'bowl', 'feedforward']
    """
    is_taken = name in ("feedforward", "total") or hasattr(nn.ModuleDict, name)
    if not name.isidentifier() or is_taken:
        raise ValueError(
            f"name = {name!r}: must be a Python identifier, and not 'feedforward' (the place of "
            "the configuration's feed-forward energy), 'total' (the sum of all) or a method of "
            "torch.nn.ModuleDict"
        )

    def origin(made: object) -> tuple[object, ...]:
        return getattr(made, "__module__", None), getattr(made, "__qualname__", made)

    known = ENERGIES.get(name)
    if known is not None and origin(known) != origin(energy):  # the same module may come again
        raise ValueError(f"name = {name!r}: another energy has it; choose another name")
    ENERGIES[name] = energy
