"""nrgpt: GPTs whose forward pass rolls tokens down an energy landscape.

    cfg = nrgpt.ModelConfig(vocab_size=65, context=256, width=128, heads=4, steps=8)
    model = nrgpt.LanguageModel(cfg)
    logits, loss = model(idx, targets)

    nrgpt.load("zoo:shakespeare_certified").generate("ROMEO:")

Importing this package loads torch and nothing heavier.
"""

from .dynamics.trajectory import Step, Trajectory, stream_trajectory, trajectory
from .hf.registration import watch
from .interop.released import load_released
from .language_model import LanguageModel
from .model.certificate import Certificate, Finding, Guarantee
from .model.config import ModelConfig
from .model.energy import EnergyTerm, Readout, register
from .model.init import normal, ones, parameter, zeros
from .model.network import ParameterCounts
from .model.registry import load_plugin
from .text_model import TextModel, load

__version__ = "0.1.0"

watch()  # transformers, if and when it is imported, learns of our models

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
