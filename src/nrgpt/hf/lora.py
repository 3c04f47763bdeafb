"""LoRA with peft. peft wraps nn.Linear modules, but our weights are parameters that are read in
several places. ``as_linear`` computes each chosen weight by an nn.Linear instead:

    model = as_linear(AutoModelForCausalLM.from_pretrained(folder), ["W_Q", "W_K", "W_1", "W_2"])
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["linear"]))
    ...                                      # train it; model.save_pretrained writes the adapter
    model = as_parameters(model.merge_and_unload())                     # an ordinary model again
"""

from collections.abc import Collection
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..check import suggestion

Model = TypeVar("Model", bound=nn.Module)


class ByLinear(nn.Module):
    """A weight W (..., out, in), computed by applying ``linear`` to the identity. This gives W,
    and W + B A once peft has wrapped ``linear``."""

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
    """Prepare the matrices with these names (by default those of the attention) for LoRA. Changes
    the model in place."""
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
    for module, name in matrices:
        if name in names:
            parametrize.register_parametrization(module, name, ByLinear(getattr(module, name)))
    return model


def as_parameters(model: Model) -> Model:
    """Undo ``as_linear`` in place, but keep the current values."""
    for module in list(model.modules()):
        applied: Any = getattr(module, "parametrizations", {})
        for name in [name for name, by in applied.items() if isinstance(by[0], ByLinear)]:
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return model
