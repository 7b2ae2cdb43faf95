"""The transpose of fp8 codes, made in the backward and not before."""

from functools import cache

import torch
from torch import Tensor

from ftrain.kernels import HAS_TRITON

TILE = (128, 128, 8)  # rows, columns, warps: the fastest of eight tried on an H200, 3.7 TB/s read and written


@torch.library.custom_op("ftrain::transposed_after", mutates_args=())
def transposed_after(codes: Tensor, after: Tensor) -> Tensor:
    """codes (rows, columns), of one byte each, as a contiguous (columns, rows).

    after: a tensor of the backward, such as the gradient that comes in. Only its name is used: a compiler that
    divides a graph in forward and backward may otherwise make the copy in the forward and keep it, which would be a
    second copy of every layer's weights.
    """
    if not (codes.is_cuda and HAS_TRITON and codes.numel()):
        return codes.t().clone(memory_format=torch.contiguous_format)  # never a view, as of one row it might be
    codes = codes.contiguous()
    rows, columns = codes.shape
    out = torch.empty((columns, rows), dtype=codes.dtype, device=codes.device)
    height, width, warps = TILE
    with torch.cuda.device(codes.device):
        _kernel()[(-(-rows // height), -(-columns // width))](
            codes.view(torch.uint8), out.view(torch.uint8), rows, columns, ROWS=height, COLUMNS=width, num_warps=warps
        )
    return out


@transposed_after.register_fake
def _(codes: Tensor, after: Tensor) -> Tensor:
    return codes.new_empty((codes.shape[1], codes.shape[0]))


@cache
def _kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(codes_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        here = (r < rows)[:, None] & (c < columns)[None, :]
        tile = tl.load(codes_ptr + r.to(tl.int64)[:, None] * columns + c[None, :], here, other=0)
        there = (c < columns)[:, None] & (r < rows)[None, :]
        tl.store(out_ptr + c.to(tl.int64)[:, None] * rows + r[None, :], tl.trans(tile), there)

    return kernel
