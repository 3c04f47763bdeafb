"""nrgpt in Hugging Face's tools: wrappers, export, import and fine-tuning.

    nrgpt.hf.export_run(Path("runs/demo"), Path("demo-hf"))
    model = transformers.AutoModelForCausalLM.from_pretrained("demo-hf")

``import nrgpt`` registers the wrappers with the Auto classes as soon as transformers is imported,
before or after. Importing this package loads nothing heavy: its contents are loaded on first use,
and need ``pip install 'nrgpt[hf]'``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..interop.gpt2 import from_gpt2, to_gpt2
    from .configuration import NRGPTConfig
    from .export import export_run
    from .lora import as_linear, as_parameters
    from .modeling import NRGPTForCausalLM, NRGPTModel, NRGPTOutput
    from .past import NRGPTCache
    from .push import push_run

WHERE = {
    "NRGPTCache": "past",
    "NRGPTConfig": "configuration",
    "NRGPTForCausalLM": "modeling",
    "NRGPTModel": "modeling",
    "NRGPTOutput": "modeling",
    "as_linear": "lora",
    "as_parameters": "lora",
    "export_run": "export",
    "from_gpt2": ".interop.gpt2",
    "push_run": "push",
    "to_gpt2": ".interop.gpt2",
}
EXTRA = ("huggingface_hub", "tokenizers", "transformers")

__all__ = [
    "NRGPTCache",
    "NRGPTConfig",
    "NRGPTForCausalLM",
    "NRGPTModel",
    "NRGPTOutput",
    "as_linear",
    "as_parameters",
    "export_run",
    "from_gpt2",
    "push_run",
    "to_gpt2",
]


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{WHERE[name]}", __name__)
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        missing = error.name.partition(".")[0]
        raise ImportError(
            f"nrgpt.hf.{name} needs {missing}: pip install 'nrgpt[hf]'", name=error.name
        ) from None
    return getattr(module, name)
