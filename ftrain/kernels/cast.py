"""fp8 codes of a matrix and of its transpose, from one read of the matrix.

Tensor cores take fp8 operands with the contracted dim last, so a linear layer needs its input and its output's
gradient both ways round. Compiled from plain operations that is two kernels that each read the matrix, the second
writing across memory; here one program casts a tile and writes it twice.
"""

from functools import cache

import torch
from torch import Tensor

from ftrain.kernels import HAS_TRITON

TILE = (64, 64, 2)  # rows, columns, warps: the fastest of eight tried on an H200, at 2.7 TB/s read and written


def runs_on(x: Tensor) -> bool:
    """Whether the kernel can run on a matrix. Not on float32: Triton 3.6 made wrong codes from its vector loads."""
    return x.is_cuda and HAS_TRITON and x.dtype == torch.bfloat16


def cast_both_plain(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """fp8 codes of x (rows, columns) and of its transpose (columns, rows), both contiguous, by fp8.formats.cast."""
    from ftrain.fp8.formats import cast

    codes = cast(x, scale, dtype)
    return codes, codes.t().contiguous()


@torch.library.custom_op("ftrain::cast_both", mutates_args=())
def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`cast_both_plain` in one kernel. x: (rows, columns) for which `runs_on`; scale: float32 ()."""
    x = x.contiguous()
    rows, columns = x.shape
    codes = torch.empty((rows, columns), dtype=dtype, device=x.device)
    codes_t = torch.empty((columns, rows), dtype=dtype, device=x.device)
    if x.numel():
        height, width, warps = TILE
        grid = (-(-rows // height), -(-columns // width))
        limit = torch.finfo(dtype).max
        with torch.cuda.device(x.device):
            # Bytes: Triton writes what it converted, and need not know torch's name for the format.
            _kernel()[grid](
                x, scale, codes.view(torch.uint8), codes_t.view(torch.uint8), rows, columns, limit,
                E5M2=dtype == torch.float8_e5m2, ROWS=height, COLUMNS=width, num_warps=warps,
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
