"""Tell transformers' Auto classes of our wrappers when transformers is imported, and not before.

``import nrgpt`` must stay light, so it only leaves a watcher at the import machinery: once
transformers has loaded its table of configurations, ours joins it; once it has loaded its table of
models and what models are made of, the models join too.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

CONFIGS = "transformers.models.auto.configuration_auto"
MODELS = "transformers.models.auto.modeling_auto"
WATCHED = (CONFIGS, MODELS, "transformers.modeling_utils", "transformers.generation.utils")


class Watcher(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it asks the other finders, and looks on as the module is executed."""

    def __init__(self) -> None:
        self.under_way: set[str] = set()
        self.done: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in WATCHED:
            return None
        found = (
            finder.find_spec(name, path, target)
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        )
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self.look_on(name, spec.loader)
        return spec

    def look_on(self, name: str, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self.under_way.add(name)
            try:
                execute(module)
            finally:
                self.under_way.discard(name)
            self.register()

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def register(self) -> None:
        """Whatever can be registered by now: transformers' modules import one another, so one that
        is under way must not be used yet."""
        there = {name for name in WATCHED if name in sys.modules} - self.under_way
        if there and not is_known(sys.modules["transformers"]):
            return
        if CONFIGS in there and CONFIGS not in self.done:
            self.done.add(CONFIGS)
            register_config()
        if MODELS in there and MODELS not in self.done and not self.under_way:
            self.done.add(MODELS)
            register_models()


def is_known(transformers: ModuleType) -> bool:
    """Versions before 5 must not fail because nrgpt, too, was imported."""
    return int(transformers.__version__.partition(".")[0]) >= 5


def watch() -> None:
    """Register now what transformers has loaded, and the rest when it does."""
    if any(isinstance(finder, Watcher) for finder in sys.meta_path):
        return
    watcher = Watcher()
    sys.meta_path.insert(0, watcher)
    watcher.register()


def register_config() -> None:
    from transformers import AutoConfig

    from .configuration import NRGPTConfig

    AutoConfig.register("nrgpt", NRGPTConfig, exist_ok=True)


def register_models() -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    from .configuration import NRGPTConfig
    from .modeling import NRGPTForCausalLM, NRGPTModel

    AutoModel.register(NRGPTConfig, NRGPTModel, exist_ok=True)
    AutoModelForCausalLM.register(NRGPTConfig, NRGPTForCausalLM, exist_ok=True)
