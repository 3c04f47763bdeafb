# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Cross-entropy of rows of logits, which their gradient overwrites, as a Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def cross_entropy_kernel(
    logits_at, target_at, weight_at, loss_at, kinds, row_stride,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of one row of logits; with GRADIENT, its gradient overwrites the row."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_at + row * row_stride
    target, weight = tl.load(target_at + row), tl.load(weight_at + row)
    answer = tl.load(logits + target).to(tl.float32)  # before anything is overwritten
    column = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, kinds, BLOCK):
        z = tl.load(logits + start + column, mask=start + column < kinds, other=float("-inf")).to(
            tl.float32
        )
        new = tl.maximum(largest, z)
        total = total * tl.exp(largest - new) + tl.exp(z - new)
        largest = new
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tl.store(loss_at + row, (log_sum - answer) * weight)
    if GRADIENT:
        for start in range(0, kinds, BLOCK):
            inside = start + column < kinds
            z = tl.load(logits + start + column, mask=inside, other=0.0).to(tl.float32)
            error = tl.exp(z - log_sum) - tl.where(start + column == target, 1.0, 0.0)
            tl.store(logits + start + column, error * weight, mask=inside)


@torch.library.custom_op("nrgpt::cross_entropy_", mutates_args={"logits"})
def cross_entropy_(logits: Tensor, targets: Tensor, weight: Tensor, gradient: bool) -> Tensor:
    """Weighted losses of rows of logits, in float32; with ``gradient``, the gradient of their sum
    overwrites the logits."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(len(logits),)](
            logits, targets, weight, losses, logits.shape[1], logits.stride(0),
            GRADIENT=gradient, BLOCK=4096, num_warps=8,
        )  # fmt: skip
    return losses


@cross_entropy_.register_fake
def _(logits: Tensor, targets: Tensor, weight: Tensor, gradient: bool) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)
