"""Weights in 8 bits, by torchao.

torchao quantises ``nn.Linear`` modules, and ours are parameters. So each matrix of the blocks is
first computed by an ``nn.Linear`` (lora.py), whose weight torchao then replaces. It is expanded
once for all steps of a forward pass. Embeddings, norms and rates stay as they are.
"""

from collections.abc import Collection
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor, nn

from ..check import check_choice
from ..extras import need
from .lora import ByLinear, as_linear

Model = TypeVar("Model", bound=nn.Module)
Kind = Literal["int8"]
"""(torchao packs 4 bits for some GPUs only, which we have not tested.)"""
LEAST = 32
"""Rows and columns of a matrix that is worth it."""


def quantise(model: Model, kind: Kind = "int8", names: Collection[str] | None = None) -> Model:
    """Quantise the matrices of the blocks, or those of these names, in place, for inference."""
    check_choice("kind", kind, get_args(Kind))
    need("torchao", "quantise()", "quantise")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    chosen = matrices(model) if names is None else set(names)
    model.requires_grad_(False)
    as_linear(model, chosen)
    quantize_(model, Int8WeightOnlyConfig())
    for module, name in linears(model):
        found: Any = module.parametrizations
        by = found[name]
        if type(by[0].linear.weight) is nn.Parameter or type(by[0].linear.weight.data) is Tensor:
            raise ValueError(f"torchao left {name} as it was: {kind} is not possible here")
        # The weight itself is needed for its type and device only.
        by.original = nn.Parameter(by.original.new_empty(0), requires_grad=False)
    return model


def matrices(model: nn.Module) -> set[str]:
    """Names of the large matrices of the blocks."""
    return {
        name.rpartition(".")[2]
        for name, p in model.named_parameters()
        if ".blocks." in f".{name}" and p.dim() >= 2 and min(p.shape) >= LEAST
    }


def linears(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for module in model.modules()
        for name, by in getattr(module, "parametrizations", {}).items()
        if isinstance(by[0], ByLinear)
    ]


def stored_bytes(model: nn.Module) -> int:
    """What the weights take in memory."""
    return sum(bytes_of(p) for p in model.parameters())


def bytes_of(tensor: Any) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.element_size())
