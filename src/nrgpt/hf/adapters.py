"""peft's adapters of parameters, LoraConfig(target_parameters=[...]), in models that never call the
forward of the modules that own them.

peft wraps such a module, and changes its weight while the wrapper's forward runs. But energies are
asked for their readouts, once for all steps. So for one forward pass of the whole model each
wrapper makes way for its module, whose weight then is W + B A.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize


class Added(nn.Module):
    """W plus what an adapter has learned. (Not a parameter of the model: peft keeps that.)"""

    def __init__(self, delta: Tensor):
        super().__init__()
        self.delta = delta

    def forward(self, W: Tensor) -> Tensor:
        return W + self.delta


def with_adapters(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of a model that may have been given to peft."""

    @functools.wraps(forward)
    def run(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        if not getattr(self, "peft_config", None):
            return forward(self, *arguments, **options)
        with ExitStack() as stack:
            for parent in list(self.modules()):
                for name, child in list(parent.named_children()):
                    if is_wrapper(child) and not is_wrapper(parent):
                        stack.enter_context(unwrapped(parent, name, child))
            return forward(self, *arguments, **options)

    return run


def is_wrapper(module: nn.Module) -> bool:
    """peft's ParamWrapper; peft itself is not imported here."""
    return hasattr(module, "parameter_name") and hasattr(module, "get_delta_weight")


@contextmanager
def unwrapped(parent: nn.Module, name: str, wrapper: Any) -> Iterator[None]:
    """The module itself in the wrapper's place. Several parameters of a module have wrappers around
    one another."""
    changed, layer, module = [], wrapper, wrapper.get_base_layer()
    while is_wrapper(layer):
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A and not layer.merged and not layer.disable_adapters:
                changed.append((layer.parameter_name, layer.get_delta_weight(adapter)))
        layer = layer.base_layer
    parent._modules[name] = module
    try:
        for weight, delta in changed:
            needs_grad = getattr(module, weight).requires_grad
            parametrize.register_parametrization(module, weight, Added(delta))
            module.parametrizations[weight].original.requires_grad_(needs_grad)
        yield
    finally:
        for weight in dict.fromkeys(weight for weight, _ in changed):
            parametrize.remove_parametrizations(module, weight, leave_parametrized=False)
        parent._modules[name] = wrapper
