"""nrgpt in Hugging Face's tools: wrappers, export, import and fine-tuning.

    nrgpt.hf.export_run(Path("runs/demo"), Path("demo-hf"))
    model = transformers.AutoModelForCausalLM.from_pretrained("demo-hf")

``import nrgpt`` registers the wrappers with the Auto classes as soon as transformers is imported,
before or after. Importing this package loads nothing heavy: its contents are loaded on first use,
and need ``pip install 'nrgpt[hf]'``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..extras import need

if TYPE_CHECKING:
    from ..interop.gpt2 import from_gpt2 as from_gpt2
    from ..interop.gpt2 import to_gpt2 as to_gpt2
    from .configuration import NRGPTConfig as NRGPTConfig
    from .export import export_run as export_run
    from .lora import as_linear as as_linear
    from .lora import as_parameters as as_parameters
    from .modeling import NRGPTForCausalLM as NRGPTForCausalLM
    from .modeling import NRGPTModel as NRGPTModel
    from .modeling import NRGPTOutput as NRGPTOutput
    from .onnx_file import export_onnx as export_onnx
    from .past import NRGPTCache as NRGPTCache
    from .push import push_run as push_run
    from .quantisation import quantise as quantise
    from .quantisation import stored_bytes as stored_bytes

CONTENTS = {
    ".configuration": ["NRGPTConfig"],
    ".export": ["export_run"],
    ".lora": ["as_linear", "as_parameters"],
    ".modeling": ["NRGPTForCausalLM", "NRGPTModel", "NRGPTOutput"],
    ".past": ["NRGPTCache"],
    ".onnx_file": ["export_onnx"],
    ".push": ["push_run"],
    ".quantisation": ["quantise", "stored_bytes"],
    "..interop.gpt2": ["from_gpt2", "to_gpt2"],
}
WHERE = {name: module for module, names in CONTENTS.items() for name in names}
EXTRA = ("huggingface_hub", "tokenizers", "transformers")

__all__ = sorted(WHERE)


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in EXTRA:
        need(package, f"nrgpt.hf.{name}", "hf")
    return getattr(importlib.import_module(WHERE[name], __name__), name)
