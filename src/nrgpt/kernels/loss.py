"""Cross-entropy of a linear head.

The plain version makes the logits of all tokens and a float32 copy: with a vocabulary of 50,304,
0.4 MB a token, more than everything else. The chunked one makes them for some tokens at a time and
computes the gradient for the backward pass while it has them, so that no logits are kept and none
are computed twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import choose

IGNORED_TARGET = -100
"""A target with this value does not count in the loss."""
CHUNK = 2**25
"""Logits made at a time by the chunked version."""
CHUNK_ON_GPU = 2**29
"""The same on a GPU, where a product must be large to be fast."""


def plain_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy, in at least float32: a sum over a large vocabulary does not survive
    bfloat16."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    options: dict[str, Any] = {"ignore_index": IGNORED_TARGET, "reduction": reduction}
    return F.cross_entropy(precise.flatten(0, -2), targets.flatten(), **options)


def head_loss(h: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the logits h head^T + bias, in chunks if there are many of them."""
    tokens = h.shape[:-1].numel()
    if tokens * len(head) <= CHUNK:
        return plain_loss(F.linear(h, head, bias), targets)
    if not torch.is_grad_enabled():  # else ChunkedLoss would compute gradients
        h, head, bias = h.detach(), head.detach(), None if bias is None else bias.detach()
    most = max(1, (CHUNK_ON_GPU if h.is_cuda else CHUNK) // len(head))
    rows = -(-tokens // -(-tokens // most))  # parts of equal size
    return ChunkedLoss.apply(h.flatten(0, -2), head, bias, targets.flatten(), rows)


def loss_and_error(
    logits: Tensor, answer: Tensor, weight: Tensor, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Weighted losses of rows of logits, and the gradient of their sum, which may overwrite the
    logits."""
    if choose(logits).fused:
        from .triton_loss import cross_entropy_

        losses = cross_entropy_(logits, answer, weight, wants_gradient)
        return losses, logits if wants_gradient else None
    precise = logits.to(weight.dtype)
    log_sum = precise.logsumexp(-1, keepdim=True)
    losses = (log_sum - precise.gather(1, answer[:, None]))[:, 0] * weight
    if not wants_gradient:
        return losses, None
    error = (precise - log_sum).exp_().mul_(weight[:, None])
    error.scatter_add_(1, answer[:, None], -weight[:, None])
    return losses, error.to(logits.dtype)


class ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, rows: int
    ) -> Tensor:
        needs = ctx.needs_input_grad
        wants_gradient = any(needs[:3])
        counted = targets != IGNORED_TARGET
        dtype = torch.promote_types(h.dtype, torch.float32)
        share = 1 / counted.sum().to(dtype)
        loss = torch.zeros((), dtype=dtype, device=h.device)
        dh = torch.empty_like(h) if needs[0] else None
        dhead = torch.zeros_like(head, dtype=dtype) if needs[1] else None
        dbias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needs[2] else None
        for start in range(0, len(h), rows):
            part = slice(start, start + rows)
            logits = F.linear(h[part], head, bias)  # in bfloat16 under autocast
            answer, weight = targets[part].clamp(min=0), counted[part] * share
            losses, error = loss_and_error(logits, answer, weight, wants_gradient)
            # Not in place: torch.compile before 2.12 would take the gradient to be zero.
            loss = loss + losses.sum()
            if error is None:
                continue
            if dh is not None:
                dh[part] = error @ head.to(error.dtype)
            if dhead is not None:
                dhead += error.mT @ h[part].to(error.dtype)
            if dbias is not None:
                dbias += error.sum(0, dtype=dtype)
        ctx.save_for_backward(
            dh,
            None if dhead is None else dhead.to(head.dtype),
            None if dbias is None or bias is None else dbias.to(bias.dtype),
        )
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors]
        return (*gradients, None, None)
