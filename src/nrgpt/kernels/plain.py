"""Plain PyTorch versions of operations that have a faster one: the reference for the kernels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import is_packed
from .pointwise import ACTIVATIONS


class PackedAttention(torch.autograd.Function):
    """Causal attention in packed training: under vmap, runs become part of the batch. (For some
    attention kernels vmap would loop over them.) Only differentiated outside of vmap."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, int]:
        def merged(x: Tensor, dim: int | None) -> Tensor:
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        q, k, v = (merged(x, dim) for x, dim in zip((q, k, v), in_dims[:3], strict=True))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.unflatten(0, (info.batch_size, -1)), 0


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """sum_{B<=A} softmax_B(scale q_A . k_B) v_B."""
    if is_packed() and not torch.compiler.is_compiling():
        return PackedAttention.apply(q, k, v, scale)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def plain_attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, strict: bool) -> Tensor:
    """sum_B softmax_B(scale q_A . k_B) v_B for all tokens of a text, shaped like q."""
    if not strict:
        return causal_attention(q, k, v, scale)
    if q.shape[-2] == 1:
        return torch.zeros_like(q)
    out = causal_attention(q[..., 1:, :], k[..., :-1, :], v[..., :-1, :], scale)
    return F.pad(out, (0, 0, 1, 0))


def plain_attend_read(z: Tensor, heads: int, scale: float, *, strict: bool) -> Tensor:
    q, k = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in z.chunk(2, dim=-1))
    return plain_attend(q, k, k, scale, strict=strict).transpose(1, 2).flatten(-2)


def plain_pair_force(z: Tensor, activation: str) -> Tensor:
    sigma = ACTIVATIONS[activation]
    z_1, z_2 = z.chunk(2, dim=-1)
    return torch.cat([sigma.pull(z_2, z_1), sigma.value(z_1)], dim=-1)


def plain_square_force(z: Tensor, activation: str) -> Tensor:
    sigma = ACTIVATIONS[activation]
    return sigma.pull(2 * sigma.value(z), z)


def plain_feedforward(
    g: Tensor, R: Tensor, bias: Tensor | None, write: Tensor, activation: str, pair: bool
) -> Tensor:
    force = plain_pair_force if pair else plain_square_force
    return F.linear(force(F.linear(g, R, bias), activation), write)
