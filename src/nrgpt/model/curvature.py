"""Upper bounds on eigenvalues, from matrix products alone.

They are asked for in every forward pass of a model whose energy is not concave (see
nrgpt.model.safeguard), also inside recorded and batched ones, where no eigenvalue solver can go.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

SQUARINGS = 6
"""The bound is (sum of |eigenvalue|^p)^(1/p) with p = 2^6. That is above the truth by a factor of
n^(1/64) at most, 1.11 for n = 768."""
ROUNDING = 1.001


@torch.no_grad()
def largest_eigenvalue(M: Tensor) -> Tensor:
    """A bound on |eigenvalue| for matrices (..., n, n) whose eigenvalues are real: (tr M^p)^(1/p).
    For nothing but the bound: no gradient flows."""
    with nullcontext() if M.is_meta else torch.autocast(M.device.type, enabled=False):
        M = M.to(torch.promote_types(M.dtype, torch.float32))
        tiny = torch.finfo(M.dtype).tiny
        bound = torch.ones_like(M[..., 0, 0])
        for i in range(SQUARINGS):
            size = M.square().sum((-2, -1)).sqrt().clamp(min=tiny)
            bound = bound * size**2.0**-i
            M = M / size[..., None, None]
            M = M @ M
        trace = M.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=tiny)
        return ROUNDING * bound * trace**2.0**-SQUARINGS


def bilinear_norms(A: Tensor, B: Tensor) -> Tensor:
    """A bound on the size of A^T B + B^T A, for A and B of shape (..., rows, D), few rows or many.

    With C = [A; B] it is C^T P C, where P swaps the two halves, and so has the eigenvalues of
    P C C^T: a small matrix if there are few rows."""
    both, swapped = torch.cat([A, B], dim=-2), torch.cat([B, A], dim=-2)
    if both.shape[-2] < both.shape[-1]:
        return largest_eigenvalue(swapped @ both.mT)
    return largest_eigenvalue(A.mT @ B + B.mT @ A)


def bilinear_size(A: Tensor, B: Tensor) -> Tensor:
    """A bound on the spectral norm of A^T B, for A and B of shape (..., rows, D): its square is an
    eigenvalue of (A A^T) (B B^T)."""
    return largest_eigenvalue((A @ A.mT) @ (B @ B.mT)).sqrt()
