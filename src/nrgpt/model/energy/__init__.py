"""Energies per token: the contract of a term, the terms, and their sum."""

from .attention import AttentionEnergy
from .feedforward import FEEDFORWARD
from .term import EnergyTerm, Readout
from .total import TotalEnergy

__all__ = ["FEEDFORWARD", "AttentionEnergy", "EnergyTerm", "Readout", "TotalEnergy"]
