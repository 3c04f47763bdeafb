"""Causal attention with K = V, and the logsumexp of its scores.

Both take queries and keys of shape (batch, heads, tokens, size); all heads may share their keys, of
shape (batch, 1, tokens, size). ``strict`` lets token A see the tokens B < A: queries 1..N-1 against
keys 0..N-2 under an ordinary causal mask. The first token sees nothing and gets zero by
construction: a softmax over an empty set has no gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import choose

if TYPE_CHECKING:
    from ..cache import Seen

_merges_packed = False


@contextmanager
def packed_attention() -> Iterator[None]:
    """Inside, attention under torch.vmap takes the packed dimension for a part of the batch. (For
    some of its kernels vmap knows no better than a loop.)"""
    global _merges_packed
    _merges_packed = True
    try:
        yield
    finally:
        _merges_packed = False


class PackedAttention(torch.autograd.Function):
    """Causal attention that vmap may batch. Differentiated outside of vmap only."""

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
        q, k, v = (
            (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(
                0, 1
            )
            for x, dim in zip((q, k, v), in_dims[:3], strict=True)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.unflatten(0, (info.batch_size, -1)), 0


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """sum_{B<=A} softmax_B(scale q_A . k_B) v_B."""
    if _merges_packed and not torch.compiler.is_compiling():
        return PackedAttention.apply(q, k, v, scale)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def attend(q: Tensor, k: Tensor, scale: float, *, strict: bool) -> Tensor:
    """sum_B softmax_B(scale q_A . k_B) k_B, shaped like q."""
    k = k.expand(-1, q.shape[1], -1, -1)
    if not strict:
        return causal_attention(q, k, k, scale)
    if q.shape[-2] == 1:
        return torch.zeros_like(q)
    q, k = q[..., 1:, :], k[..., :-1, :]
    out = causal_attention(q, k, k, scale)
    return F.pad(out, (0, 0, 1, 0))


def logsumexp_scores(q: Tensor, k: Tensor, scale: float, *, strict: bool) -> Tensor:
    """log sum_B exp(scale q_A . k_B), shape (batch, heads, tokens); 0 where nothing is seen."""
    if strict:
        if q.shape[-2] == 1:
            return torch.zeros_like(q[..., 0])
        return F.pad(logsumexp_scores(q[..., 1:, :], k[..., :-1, :], scale, strict=False), (1, 0))
    scores = scale * (q @ k.transpose(-2, -1))
    unseen = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    return scores.masked_fill(unseen, float("-inf")).logsumexp(-1)


def attend_kept(q: Tensor, kept: Tensor, seen: "Seen", scale: float, *, strict: bool) -> Tensor:
    """Attention of new tokens to those of the kept keys that they may see."""
    if q.shape[2] == 1 and not q.requires_grad and choose(q).fused:
        from .triton_kernels import attend_one

        return attend_one(q, kept, seen.positions, scale, strict=strict)
    window, mask = seen.window(kept, strict=strict)
    return attend_among(q, window, scale, mask)


def attend_among(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Attention of new tokens to kept keys: all of them (there must be one), or those that the mask
    allows; a token that sees nothing gets zero."""
    k = k.expand(-1, q.shape[1], -1, -1)
    if mask is None:
        return F.scaled_dot_product_attention(q, k, k, scale=scale)
    blind = ~mask.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, k, attn_mask=mask | blind, scale=scale)
    return out.masked_fill(blind, 0)


def logsumexp_among(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """log sum_B exp(scale q_A . k_B) over the keys that ``attend_among`` looks at; 0 where nothing
    is seen."""
    scores = scale * (q @ k.transpose(-2, -1))
    if mask is None:
        return scores.logsumexp(-1)
    blind = ~mask.any(-1)
    scores = scores.masked_fill(~(mask | blind.unsqueeze(-1)), float("-inf"))
    return scores.logsumexp(-1).masked_fill(blind, 0)
