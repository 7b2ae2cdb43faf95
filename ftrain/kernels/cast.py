"""fp8 codes of a matrix and of its transpose, from one read of the matrix.

Tensor cores take fp8 operands with the contracted dim last, so a linear layer needs its input and its output's
gradient both ways round. Compiled from plain operations that is two kernels that each read the matrix, the second
writing across memory; here one program casts a tile and writes it twice.
"""

from functools import cache

import torch
from torch import Tensor

from ftrain.kernels import HAS_TRITON

TILE = (128, 128, 4)  # rows, columns, warps: the fastest of twelve tried on an H200, 3.7 TB/s read and written
TOGETHER = 4  # rows whose codes make one word


def runs_on(x: Tensor) -> bool:
    """Whether the kernel can run on a matrix: bfloat16, with rows that divide by 4."""
    return x.is_cuda and HAS_TRITON and x.dtype == torch.bfloat16 and x.shape[0] % TOGETHER == 0


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
            _kernel()[grid](
                x, scale, codes.view(torch.uint8), codes_t.view(torch.int32), rows // TOGETHER, columns, limit,
                E5M2=dtype == torch.float8_e5m2, ROWS=height // TOGETHER, COLUMNS=width, num_warps=warps,
            )  # fmt: skip
    return codes, codes_t


@cast_both.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((x.shape[1], x.shape[0]), dtype=dtype)


@cache
def _kernel():
    import triton
    import triton.language as tl

    # The conversion is spelt out: it makes a word of four codes, which goes through the transpose whole.
    words = {
        e5m2: "{.reg .b16 low, high; "
        + "".join(
            f"cvt.rn.satfinite.{name}x2.f32 {half}, ${b}, ${a}; " for half, a, b in (("low", 1, 2), ("high", 3, 4))
        )
        + "mov.b32 $0, {low, high};}"
        for e5m2, name in ((False, "e4m3"), (True, "e5m2"))
    }
    E4M3_WORD, E5M2_WORD = tl.constexpr(words[False]), tl.constexpr(words[True])

    @triton.jit
    def scaled(x, scale, limit):
        y = x * scale
        # The clamp would hide NaN and Inf: x - x is 0 for a number only, and y is NaN where the scale is.
        is_number = (x - x == 0) & (y == y)
        return tl.where(is_number, tl.minimum(tl.maximum(y, -limit), limit), float("nan"))

    @triton.jit
    def kernel(
        x_ptr, scale_ptr, codes_ptr, words_t_ptr, quads, columns, limit,
        E5M2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        q = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        here = (q < quads)[:, None] & (c < columns)[None, :]
        scale = tl.load(scale_ptr)
        at = q.to(tl.int64)[:, None] * (4 * columns) + c[None, :]
        y0 = scaled(tl.load(x_ptr + at, here, other=0.0).to(tl.float32), scale, limit)
        y1 = scaled(tl.load(x_ptr + at + columns, here, other=0.0).to(tl.float32), scale, limit)
        y2 = scaled(tl.load(x_ptr + at + 2 * columns, here, other=0.0).to(tl.float32), scale, limit)
        y3 = scaled(tl.load(x_ptr + at + 3 * columns, here, other=0.0).to(tl.float32), scale, limit)
        word = tl.inline_asm_elementwise(
            E5M2_WORD if E5M2 else E4M3_WORD, "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1
        )
        tl.store(codes_ptr + at, (word & 0xFF).to(tl.uint8), here)
        tl.store(codes_ptr + at + columns, ((word >> 8) & 0xFF).to(tl.uint8), here)
        tl.store(codes_ptr + at + 2 * columns, ((word >> 16) & 0xFF).to(tl.uint8), here)
        tl.store(codes_ptr + at + 3 * columns, ((word >> 24) & 0xFF).to(tl.uint8), here)
        there = (c < columns)[:, None] & (q < quads)[None, :]
        tl.store(words_t_ptr + c.to(tl.int64)[:, None] * quads + q[None, :], tl.trans(word), there)

    return kernel
