"""Register our wrappers with transformers' Auto classes, but only once transformers is imported.

``import nrgpt`` must stay light, so it only adds a watcher to Python's import machinery. As soon as
transformers has loaded its table of configurations, ours is added to it. The models follow once the
table of models, and the modules that models need, have been loaded; the tokenizer likewise.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

CONFIGS = "transformers.models.auto.configuration_auto"
MODELS = "transformers.models.auto.modeling_auto"
TOKENIZERS = "transformers.models.auto.tokenization_auto"
WATCHED = (
    CONFIGS,
    MODELS,
    TOKENIZERS,
    "transformers.modeling_utils",
    "transformers.generation.utils",
)


class Watcher(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and calls ``register`` after a watched one has run."""

    def __init__(self) -> None:
        self.under_way: set[str] = set()
        self.done: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in WATCHED else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self.under_way.add(name)
            try:
                execute(module)
            finally:
                self.under_way.discard(name)
            self.register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def register(self) -> None:
        """Register what is possible by now. transformers' modules import each other, so modules
        whose import is still under way cannot be used yet."""
        there = {name for name in WATCHED if name in sys.modules} - self.under_way
        # transformers before version 5 is not supported, but importing nrgpt must not break it.
        if not there or int(sys.modules["transformers"].__version__.partition(".")[0]) < 5:
            return
        if CONFIGS in there - self.done:
            self.done.add(CONFIGS)
            from transformers import AutoConfig

            from .configuration import NRGPTConfig

            AutoConfig.register("nrgpt", NRGPTConfig, exist_ok=True)
        if TOKENIZERS in there - self.done and not self.under_way:
            self.done.add(TOKENIZERS)
            from transformers import AutoTokenizer

            from .configuration import NRGPTConfig
            from .tokenization import NRGPTTokenizer

            AutoTokenizer.register(NRGPTConfig, tokenizer_class=NRGPTTokenizer, exist_ok=True)
        if MODELS in there - self.done and not self.under_way:
            self.done.add(MODELS)
            from transformers import AutoModel, AutoModelForCausalLM

            from .modeling import NRGPTConfig, NRGPTForCausalLM, NRGPTModel

            AutoModel.register(NRGPTConfig, NRGPTModel, exist_ok=True)
            AutoModelForCausalLM.register(NRGPTConfig, NRGPTForCausalLM, exist_ok=True)


def watch() -> None:
    """Register what transformers has loaded already, and the rest when it does."""
    if not any(isinstance(finder, Watcher) for finder in sys.meta_path):
        watcher = Watcher()
        sys.meta_path.insert(0, watcher)
        watcher.register()
