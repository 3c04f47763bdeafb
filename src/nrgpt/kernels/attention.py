"""Causal attention with K = V, and the logsumexp of its scores.

Both take queries and keys of shape (batch, heads, tokens, size); all heads may share their keys, of
shape (batch, 1, tokens, size). ``strict`` lets token A see the tokens B < A: queries 1..N-1 against
keys 0..N-2 under an ordinary causal mask. The first token sees nothing and gets zero by
construction: a softmax over an empty set has no gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, scale: float, *, strict: bool) -> Tensor:
    """sum_B softmax_B(scale q_A . k_B) k_B, shaped like q."""
    k = k.expand(-1, q.shape[1], -1, -1)
    if not strict:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=scale)
    if q.shape[-2] == 1:
        return torch.zeros_like(q)
    q, k = q[..., 1:, :], k[..., :-1, :]
    out = F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=scale)
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


def attend_among(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Attention of new tokens to kept keys, all of them or those that the mask allows. Every token
    must see one at least."""
    k = k.expand(-1, q.shape[1], -1, -1)
    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, scale=scale)
