"""The scaled product of two fp8 matrices, whatever their shapes.

Both operands come with the contracted dimension last: a is (M, K) and b_t is (N, K). That is row-major a and
column-major b, the one layout in which tensor cores take fp8, and it makes a scale either () for the whole
operand or (rows, 1) for its rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MULTIPLE = 16  # cuBLAS takes K and N in multiples of 16 bytes


def padding(size: int) -> int:
    """How many zeros a dimension of that size gets on CUDA to become a multiple of 16."""
    return -size % MULTIPLE


def scaled_mm(
    a: Tensor,
    b_t: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    pad: bool | None = None,
) -> Tensor:
    """``(a / scale_a) @ (b_t / scale_b).T`` of fp8 codes, as (M, N) in out_dtype.

    a: (M, K) and b_t: (N, K), fp8, at most one of them e5m2. scale_a: float32 () or (M, 1); scale_b: () or
    (N, 1). fast_accum: accumulate in the tensor cores' narrower registers (CUDA). pad: bring K and N to
    multiples of 16 with zeros, which add nothing to any sum; None does it on CUDA, where it is required. Any
    dimension may be 0.
    """
    (m, k), n = a.shape, b_t.shape[0]
    if 0 in (m, k, n):
        return _empty_product(a, b_t, scale_a, scale_b, out_dtype)
    if a.is_cuda if pad is None else pad:
        a, b_t = _pad(a, 0, padding(k)), _pad(b_t, padding(n), padding(k))
        if scale_b.ndim:
            scale_b = F.pad(scale_b, (0, 0, 0, padding(n)), value=1.0)
    by_row = bool(scale_a.ndim or scale_b.ndim)
    inverse_a, inverse_b = _reciprocal(scale_a), _reciprocal(scale_b)
    if not by_row:
        out = _mm(a, b_t, inverse_a, inverse_b, out_dtype, fast_accum)
    else:
        # torch's kernels with row scales write bfloat16 only.
        inverse_a, inverse_b = inverse_a.expand(m, 1), inverse_b.expand(b_t.shape[0], 1).t()
        if fast_accum:
            out = _mm(a, b_t, inverse_a.contiguous(), inverse_b.contiguous(), torch.bfloat16, True)
        else:
            # The row-scaled kernel is slow without fast accumulation: take the tensor-scaled one and scale
            # after.
            one = torch.ones((), dtype=torch.float32, device=a.device)
            out = _mm(a, b_t, one, one, torch.bfloat16, False)
            out = (out * (inverse_a * inverse_b)).to(torch.bfloat16)
        out = out.to(out_dtype)
    return out if out.shape[1] == n else out[:, :n].contiguous()


def _mm(
    a: Tensor, b_t: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    return torch._scaled_mm(
        a.contiguous(), b_t.contiguous().t(), scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast_accum
    )


def _reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, rounded once: by way of float64, since compiled float32 division may be inexact."""
    return scale.to(torch.float64).reciprocal().to(torch.float32)


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    if rows == columns == 0:
        return x
    return F.pad(x.view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)  # 0x00 is +0 in both formats


def _empty_product(
    a: Tensor, b_t: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Zeros (M, N), or NaN where a scale says that an operand was not finite."""
    zeros = torch.zeros((a.shape[0], b_t.shape[0]), dtype=torch.float32, device=a.device)
    return (zeros * scale_a * scale_b.t()).to(out_dtype)
