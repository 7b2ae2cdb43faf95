"""The scaled product of two fp8 matrices, whatever their shapes.

Both operands come with the contracted dimension last: a is (M, K) and b_t is (N, K). That is row-major a and
column-major b, the one layout in which tensor cores take fp8, and it makes a scale either () for the whole
operand or (rows, 1) for its rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

MULTIPLE = 16  # cuBLAS takes K and N in multiples of 16 bytes
BLOCK = 128  # elements along K, and rows of a square tile, that share a block scale


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
    multiples of 16 with zeros, which add nothing to any sum; None does it where it is required: not on the
    CPU. Any dimension may be 0.
    """
    (m, k), n = a.shape, b_t.shape[0]
    if 0 in (m, k, n):
        return _empty_product(a, b_t, scale_a, scale_b, out_dtype)
    if not a.is_cpu if pad is None else pad:
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
        if fast_accum and a.is_cuda:
            out = _mm(a, b_t, inverse_a.contiguous(), inverse_b.contiguous(), torch.bfloat16, True)
        else:
            # The row-scaled kernel is slow without fast accumulation, and not every torch has one for the
            # CPU: take the tensor-scaled one and scale after. For powers of two the bits are the same.
            one = torch.ones((), dtype=torch.float32, device=a.device)
            out = _mm(a, b_t, one, one, torch.bfloat16, False)
            out = (out * (inverse_a * inverse_b)).to(torch.bfloat16)
        out = out.to(out_dtype)
    return out if out.shape[1] == n else out[:, :n].contiguous()


def block_scaled_mm(a: Tensor, b_t: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`scaled_mm` of e4m3 codes with a scale for every 128 elements along K, or for every tile of 128 by 128.

    a: (M, K), b_t: (N, K). scale_a: float32 (M, ceil(K / 128)) or (ceil(M / 128), ceil(K / 128)); scale_b:
    likewise with N; not both by tiles. Hopper only; elsewhere the same sum is done in float32, for tests.
    """
    (m, k), n = a.shape, b_t.shape[0]
    if 0 in (m, k, n):
        return torch.zeros((m, n), dtype=out_dtype, device=a.device)
    by_row = scale_a.shape[0] == m, scale_b.shape[0] == n
    if not a.is_cuda:
        wide = []
        for codes, scale, row in ((a, scale_a, by_row[0]), (b_t, scale_b, by_row[1])):
            each = scale.repeat_interleave(BLOCK, 1)
            each = each if row else each.repeat_interleave(BLOCK, 0)
            wide.append(codes.to(torch.float32) / each[: codes.shape[0], :k])
        return (wide[0] @ wide[1].t()).to(out_dtype)
    rows_a, rows_b, columns = -m % 4, -n % MULTIPLE, -k % BLOCK
    a, b_t = _pad(a, rows_a, columns), _pad(b_t, rows_b, columns)
    recipes = [ScalingType.BlockWise1x128 if row else ScalingType.BlockWise128x128 for row in by_row]
    scales = [
        _block_layout(_reciprocal(scale), row, rows)
        for scale, row, rows in zip((scale_a, scale_b), by_row, (a.shape[0], b_t.shape[0]), strict=True)
    ]
    out = F.scaled_mm(
        a.contiguous(),
        b_t.contiguous().t(),
        scales[0],
        recipes[0],
        scales[1],
        recipes[1],
        output_dtype=torch.bfloat16,
    )
    return out[:m, :n].to(out_dtype).contiguous()


def _block_layout(inverse: Tensor, by_row: bool, rows: int) -> Tensor:
    """cuBLAS's order: scales by row have the rows innermost, those of tiles K, padded to 4."""
    if by_row:
        return F.pad(inverse, (0, 0, 0, rows - inverse.shape[0]), value=1.0).t().contiguous().t()
    return F.pad(inverse, (0, -inverse.shape[1] % 4), value=1.0).contiguous().t()


def _mm(a: Tensor, b_t: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    # torch.nn.functional.scaled_mm is the public name, but up to torch 2.11 it has no CPU kernel.
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


def _empty_product(a: Tensor, b_t: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Zeros (M, N), or NaN where a scale says that an operand was not finite."""
    zeros = torch.zeros((a.shape[0], b_t.shape[0]), dtype=torch.float32, device=a.device)
    return (zeros * scale_a * scale_b.t()).to(out_dtype)
