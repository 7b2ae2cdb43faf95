"""fp8 codes of a matrix and of its transpose, from one read of the matrix.

Tensor cores take fp8 operands with the contracted dim last, so a linear layer needs its input and its output's
gradient both ways round. Compiled from plain operations that is two kernels that each read the matrix, the second
writing across memory; here one program casts a tile and writes it twice.
"""

from functools import cache

import torch
from torch import Tensor

from .adamw import runs_on

__all__ = ["cast_both", "cast_both_plain", "runs_on"]

TILE = (64, 128)  # rows, columns


def cast_both_plain(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """fp8 codes of x (rows, columns) and of its transpose (columns, rows), both contiguous, by fp8.formats.cast."""
    from ftrain.fp8.formats import cast

    codes = cast(x, scale, dtype)
    return codes, codes.t().contiguous()


@torch.library.custom_op("ftrain::cast_both", mutates_args=())
def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`cast_both_plain` in one kernel. x: bfloat16 or float32, contiguous, on CUDA; scale: float32 ()."""
    x = x.contiguous()
    rows, columns = x.shape
    codes = torch.empty((rows, columns), dtype=dtype, device=x.device)
    codes_t = torch.empty((columns, rows), dtype=dtype, device=x.device)
    if x.numel():
        grid = (-(-rows // TILE[0]), -(-columns // TILE[1]))
        limit = torch.finfo(dtype).max
        with torch.cuda.device(x.device):
            # Bytes: Triton writes what it converted, and need not know torch's name for the format.
            _kernel()[grid](
                x, scale, codes.view(torch.uint8), codes_t.view(torch.uint8), rows, columns, limit,
                E5M2=dtype == torch.float8_e5m2, ROWS=TILE[0], COLUMNS=TILE[1], num_warps=8,
            )  # fmt: skip
    return codes, codes_t


@cast_both.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((x.shape[1], x.shape[0]), dtype=dtype)


@cache
def _kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(
        x_ptr, scale_ptr, codes_ptr, codes_t_ptr, rows, columns, limit,
        E5M2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        here = (r < rows)[:, None] & (c < columns)[None, :]
        x = tl.load(x_ptr + r.to(tl.int64)[:, None] * columns + c[None, :], here, other=0.0).to(tl.float32)
        y = x * tl.load(scale_ptr)
        # The clamp would hide NaN and Inf: x - x is 0 for a number only, and y is NaN where the scale is.
        is_number = (x - x == 0) & (y == y)
        y = tl.where(is_number, tl.minimum(tl.maximum(y, -limit), limit), float("nan"))
        if E5M2:
            codes = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            codes = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(codes_ptr + r.to(tl.int64)[:, None] * columns + c[None, :], codes, here)
        there = (c < columns)[:, None] & (r < rows)[None, :]
        tl.store(codes_t_ptr + c.to(tl.int64)[:, None] * rows + r[None, :], tl.trans(codes), there)

    return kernel
