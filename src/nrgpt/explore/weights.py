"""A model written down for the page's engine (static/engine.js): a description, and its weights in
base64, each in the shortest type that is exact."""

import base64
import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.block import EnergyBlock
from ..model.energy import AttentionEnergy, EnergyTerm
from ..model.energy.feedforward import FF1, FF2, FF2W, DenseMemory, FeedForwardEnergy
from ..model.network import Network
from ..model.norm import LayerNorm, NoNorm, Norm
from ..model.planned import total_curvature
from ..model.rate import State
from ..model.transformer import ParallelBlock, SequentialBlock, TransformerBlock

MOST = 1_500_000
"""Parameters of the largest model that goes into a page; larger ones need a server."""

FEEDFORWARDS: dict[type, str] = {FF1: "ff1", FF2W: "ff2w", FF2: "ff2", DenseMemory: "memory"}


class NotForThePage(ValueError):
    """The engine does not know a part of this model."""


class Weights:
    """Tensors by name, for the page."""

    def __init__(self) -> None:
        self.list: list[dict[str, Any]] = []
        self.bytes = b""

    def add(self, name: str, tensor: Tensor | None) -> str | None:
        """The name under which the page finds this tensor; the same tensor may come again."""
        if tensor is None or any(known["name"] == name for known in self.list):
            return None if tensor is None else name
        kind, data = shortest(tensor.detach().cpu().contiguous())
        self.bytes += b"\0" * (-len(self.bytes) % 8)
        entry = {"name": name, "shape": list(tensor.shape), "type": kind, "at": len(self.bytes)}
        self.list.append(entry)
        self.bytes += data
        return name

    def add_all(self, prefix: str, owner: torch.nn.Module, names: str) -> dict[str, str | None]:
        """Those of these weights that there are."""
        given = {name: getattr(owner, name, None) for name in names.split()}
        return {name: self.add(prefix + name, weight) for name, weight in given.items()}


def shortest(tensor: Tensor) -> tuple[str, bytes]:
    """The shortest type that holds a tensor exactly, and its little-endian bytes."""
    types = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
    for name, dtype in types.items():
        short = tensor.to(dtype)
        if torch.equal(short.to(tensor.dtype), tensor):
            return name, short.view(torch.uint8).numpy().tobytes()
    return "f64", tensor.double().numpy().tobytes()


def is_small_enough(model: Network) -> bool:
    return model.parameter_counts().total <= MOST


@torch.no_grad()
def describe(model: Network) -> dict[str, Any]:
    """The model as ``new Model(description)`` of the engine takes it."""
    kept, cfg = Weights(), model.cfg
    description = {
        "width": cfg.width,
        "context": cfg.context,
        "steps": cfg.steps,
        "vocab_size": cfg.vocab_size,
        "tokens": kept.add("tokens", model.tokens),
        "positions": kept.add("positions", model.positions),
        "head": kept.add("tokens" if model.head is None else "head", model.head_weight),
        "head_bias": kept.add("head_bias", model.head_bias),
        "final_norm": norm(kept, "final_norm.", model.final_norm),
        "prelude": [block(kept, f"p{i}.", layer, 1) for i, layer in enumerate(model.prelude)],
        "prelude_shared": model.prelude.shared,
        "prelude_loops": model.prelude.loops,
        "on_sphere": model.is_on_sphere,
        "settled": model.is_settled,
        "blocks": [block(kept, f"{i}.", b, cfg.steps) for i, b in enumerate(model.blocks)],
    }
    data = base64.b64encode(kept.bytes).decode()
    return description | {"tensors": kept.list, "data": data}


def norm(kept: Weights, prefix: str, norm: Norm) -> dict[str, Any]:
    delta = norm.delta if isinstance(norm, LayerNorm) else None
    kind = "none" if isinstance(norm, NoNorm) else type(norm).__name__.lower()
    gamma = kept.add(prefix + "gamma", norm.gamma)
    return {
        "kind": kind,
        "eps": norm.eps,
        "gamma": gamma,
        "delta": kept.add(prefix + "delta", delta),
    }


def block(kept: Weights, prefix: str, block: torch.nn.Module, steps: int) -> dict[str, Any]:
    if isinstance(block, EnergyBlock):
        exact = copy.deepcopy(block).double()  # whatever is folded here is not rounded
        curvature = total_curvature(exact.named_terms(), exact.norm)
        return {
            "kind": "energy",
            "norm": norm(kept, prefix + "norm.", block.norm),
            "terms": [term(kept, prefix, name, part, exact) for name, part in block.named_terms()],
            "eta": rates(kept, prefix, exact, steps),
            **kept.add_all(prefix, block.rate, "W_M b_M"),
            "cone": block.safeguard,
            "curvature": None if curvature is None else float(curvature),
            "margin": block.margin,
        }
    assert isinstance(block, TransformerBlock)
    return transformer(kept, prefix, block)


def term(
    kept: Weights, prefix: str, name: str, term: EnergyTerm, exact: EnergyBlock
) -> dict[str, Any]:
    """By exact type: a subclass may have changed anything."""
    prefix, same = f"{prefix}{name}.", exact.terms[name]
    if type(term) is AttentionEnergy:
        assert isinstance(same, AttentionEnergy)
        queries = {"W_Q": kept.add(prefix + "J", term.J.flatten(0, 1))} if term.full else {}
        return {
            "name": name,
            "kind": "attention",
            "heads": term.heads,
            "beta": term.beta,
            "mask": term.mask,
            "alpha": kept.add(prefix + "alpha", same.strength()),
            **kept.add_all(prefix, term, "W_Q W_K W_V W_P W_drive"),
            **queries,
        }
    if not isinstance(term, FeedForwardEnergy) or type(term) not in FEEDFORWARDS:
        what = type(term).__name__
        raise NotForThePage(f"the page's engine does not know the energy {name!r} ({what})")
    units = F.softplus(same.units) if isinstance(same, DenseMemory) and same.free else None
    return {
        "name": name,
        "kind": FEEDFORWARDS[type(term)],
        "activation": term.activation,
        "potential": term.name if isinstance(term, DenseMemory) else None,
        "scale": kept.add(prefix + "scale", term.feedforward_scale),
        "units": kept.add(prefix + "units", units),
        **kept.add_all(prefix, term, "W b W_1 W_2 b_1 b_2 W_drive"),
    }


def rates(kept: Weights, prefix: str, block: EnergyBlock, steps: int) -> list[str | None]:
    """eta of all terms, or of each: diagonals (steps, D) or matrices (steps, D, D)."""
    rate, norm = block.rate, block.norm
    is_folded = rate.is_folded or isinstance(rate, State)  # what State reads off x is not in eta
    names = list(block.terms) if rate.differs_by_term else list(block.terms)[:1]
    eye = torch.eye(rate.width, dtype=torch.float64, device=next(block.parameters()).device)
    found = []
    for name in names:
        each = [folded := rate.fold(eye, norm, name)]
        if not is_folded:
            columns = folded.mT[None]  # as a text whose tokens are the columns
            each = [rate.combined({name: columns}, t, columns, norm)[0].mT for t in range(steps)]
        found.append(kept.add(f"{prefix}eta.{name}", diagonal(torch.stack(each))))
    return found


def diagonal(matrices: Tensor) -> Tensor:
    """Matrices (steps, D, D), or their diagonals, if there is nothing else in them."""
    diagonals = matrices.diagonal(dim1=-2, dim2=-1)
    return diagonals if torch.equal(diagonals.diag_embed(), matrices) else matrices


def transformer(kept: Weights, prefix: str, block: TransformerBlock) -> dict[str, Any]:
    if isinstance(block, SequentialBlock):
        kind, norms = "sequential", (block.norm_1, block.norm_2)
    else:
        assert isinstance(block, ParallelBlock)
        kind = "parallel"
        norms = (block.norm, block.norm if block.norm_2 is None else block.norm_2)
    return {
        "kind": kind,
        "norm_1": norm(kept, prefix + "norm_1.", norms[0]),
        "norm_2": norm(kept, prefix + "norm_2.", norms[1]),
        "heads": block.attention.heads,
        "beta": block.attention.scale,
        "activation": block.feedforward.activation,
        **kept.add_all(prefix, block.attention, "W_Q W_K W_V W_P b_Q b_K b_V b_P"),
        **kept.add_all(prefix, block.feedforward, "W_1 W_2 b_1 b_2"),
    }
