"""Weights in 8 or 4 bits, by torchao.

torchao quantises ``nn.Linear`` modules, and ours are parameters. So each matrix of the blocks is
first computed by an ``nn.Linear`` (lora.py), whose weight torchao then replaces. It is expanded
once for all steps of a forward pass. Embeddings, norms and rates stay as they are.

torchao rounds to 4 bits anywhere, but packs two of them into a byte for some GPUs and for ARM only;
so what it has rounded is packed here.
"""

from collections.abc import Collection
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..check import check_choice
from ..extras import need
from .lora import ByLinear, as_linear

Model = TypeVar("Model", bound=nn.Module)
Kind = Literal["int8", "int4"]
GROUP = 32
"""At most so many neighbours in a row share a scale and a zero, in 4 bits."""
LEAST = 32
"""Rows and columns of a matrix that is worth it."""


def quantise(model: Model, kind: Kind = "int8", names: Collection[str] | None = None) -> Model:
    """Quantise the matrices of the blocks, or those of these names, in place, for inference."""
    check_choice("kind", kind, get_args(Kind))
    need("torchao", "quantise()", "quantise")
    if linears(model):
        raise ValueError(
            "the model is quantised already, or as_linear has changed it: load it anew"
        )
    chosen = matrices(model) if names is None else set(names)
    model.requires_grad_(False)
    as_linear(model, chosen)
    for module, name in linears(model):
        found: Any = module.parametrizations
        by = found[name]
        by[0].linear = rounded(by[0].linear, kind, name)
        # The weight itself is needed for its type and device only.
        by.original = nn.Parameter(by.original.new_empty(0), requires_grad=False)
    return model


def rounded(linear: nn.Linear, kind: Kind, name: str) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

    config: Any = Int8WeightOnlyConfig()
    if kind == "int4":
        config = IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, "int4"),  # noqa: B009  # its stubs do not know it
            granularity=PerGroup(group(linear.in_features)),
            mapping_type=MappingType.ASYMMETRIC,
            scale_dtype=torch.bfloat16,
        )
    quantize_(linear, config, filter_fn=lambda module, path: True)
    if type(linear.weight) is nn.Parameter or type(linear.weight.data) is Tensor:
        raise ValueError(f"torchao left {name} as it was: {kind} is not possible here")
    return Packed(linear.weight) if kind == "int4" else linear


def group(columns: int) -> int:
    """The largest group into which a row can be cut."""
    return max(size for size in range(1, GROUP + 1) if columns % size == 0)


class Packed(nn.Module):
    """A linear map whose weights have 4 bits, two in a byte."""

    def __init__(self, weight: Any):
        """``weight`` as torchao has rounded it: numbers in -8 .. 7, scales and zeros by group."""
        super().__init__()
        self.shape = weight.shape
        pairs = F.pad((weight.qdata + 8).flatten(), (0, weight.numel() % 2)).view(torch.uint8)
        kept = {"pairs": pairs[::2] | pairs[1::2] << 4, "scale": weight.scale}
        for name, value in (kept | {"zero": weight.zero_point}).items():
            self.register_parameter(name, nn.Parameter(value.clone(), requires_grad=False))

    def weight(self, dtype: torch.dtype) -> Tensor:
        pairs, rows = self.get_parameter("pairs"), self.shape[0]
        numbers = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten()[: self.shape.numel()]
        grouped = numbers.view(rows, self.get_parameter("scale").shape[1], -1).to(dtype) - 8
        zero, scale = (self.get_parameter(name).to(dtype)[..., None] for name in ("zero", "scale"))
        return ((grouped - zero) * scale).view(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(x.dtype))


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
