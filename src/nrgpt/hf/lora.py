"""LoRA with peft. Our weights are parameters that several places read, not nn.Linear modules, which
is what peft wraps. ``as_linear`` lets each chosen weight be computed by such a module:

    model = as_linear(AutoModelForCausalLM.from_pretrained(folder), ["W_Q", "W_K", "W_1", "W_2"])
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["linear"]))
    ...                                      # train it; model.save_pretrained writes the adapter
    model = as_parameters(model.merge_and_unload())                     # an ordinary model again

peft's own way to parameters (``target_parameters``) acts inside of a module's forward; our terms
are asked for their read-outs before that, once for all steps.
"""

from collections.abc import Collection
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..check import suggestion

Model = TypeVar("Model", bound=nn.Module)


class ByLinear(nn.Module):
    """A weight W (..., out, in) as what ``linear`` makes of the identity: W, and W + B A once peft
    has taken hold of it."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.shape = weight.shape
        rows, columns = weight[..., 0].numel(), weight.shape[-1]
        self.linear = nn.Linear(columns, rows, bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight.detach().reshape(rows, columns))

    def forward(self, W: Tensor) -> Tensor:
        identity = torch.eye(self.shape[-1], dtype=W.dtype, device=W.device)
        return self.linear(identity).T.reshape(self.shape)


def as_linear(model: Model, names: Collection[str] | None = None) -> Model:
    """The model, changed in place: its matrices with these names (those of the attention, unless
    named) are ready for LoRA."""
    matrices = {
        (module, name)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if p.dim() >= 2
    }
    known = {name for _, name in matrices}
    if names is None:
        names = known & {"W_Q", "W_K", "W_V", "W_P", "J"}
    for name in names:
        if name not in known:
            raise ValueError(f"no matrix is called {name!r}{suggestion(name, known)}")
    chosen = [(module, name) for module, name in matrices if name in names]
    for module, name in chosen:
        parametrize.register_parametrization(module, name, ByLinear(getattr(module, name)))
    return model


def as_parameters(model: Model) -> Model:
    """The model, changed in place: what ``as_linear`` did is undone, with the values of now."""
    for module in list(model.modules()):
        if not parametrize.is_parametrized(module):
            continue
        assert isinstance(module.parametrizations, nn.ModuleDict)
        for name, applied in list(module.parametrizations.items()):
            assert isinstance(applied, parametrize.ParametrizationList)
            if isinstance(applied[0], ByLinear):
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return model
