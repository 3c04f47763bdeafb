"""nrgpt: GPTs whose forward pass rolls tokens down an energy landscape.

    cfg = nrgpt.ModelConfig(vocab_size=65, context=256, width=128, heads=4, steps=8)
    model = nrgpt.LanguageModel(cfg)
    logits, loss = model(idx, targets)

    nrgpt.load("zoo:shakespeare_certified").generate("ROMEO:")

Importing this package loads nothing heavy: torch comes with the first name that needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .hf.registration import watch

if TYPE_CHECKING:
    from .dynamics.trajectory import Step, Trajectory, stream_trajectory, trajectory
    from .interop.released import load_released
    from .language_model import LanguageModel
    from .model.certificate import Certificate, Finding, Guarantee
    from .model.config import ModelConfig
    from .model.counts import ParameterCounts
    from .model.energy import EnergyTerm, Readout, register
    from .model.init import normal, ones, parameter, zeros
    from .model.registry import load_plugin
    from .text_model import TextModel, load

__version__ = "0.1.0"

watch()  # transformers, if and when it is imported, learns of our models

HOMES = {
    "dynamics.trajectory": ("Step", "Trajectory", "stream_trajectory", "trajectory"),
    "interop.released": ("load_released",),
    "language_model": ("LanguageModel",),
    "model.certificate": ("Certificate", "Finding", "Guarantee"),
    "model.config": ("ModelConfig",),
    "model.energy": ("EnergyTerm", "Readout", "register"),
    "model.init": ("normal", "ones", "parameter", "zeros"),
    "model.counts": ("ParameterCounts",),
    "model.registry": ("load_plugin",),
    "text_model": ("TextModel", "load"),
}
"""Where each public name lives."""

__all__ = [
    "Certificate",
    "EnergyTerm",
    "Finding",
    "Guarantee",
    "LanguageModel",
    "ModelConfig",
    "ParameterCounts",
    "Readout",
    "Step",
    "TextModel",
    "Trajectory",
    "load",
    "load_plugin",
    "load_released",
    "normal",
    "ones",
    "parameter",
    "register",
    "stream_trajectory",
    "trajectory",
    "zeros",
]


def __getattr__(name: str) -> Any:
    for module, names in HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
