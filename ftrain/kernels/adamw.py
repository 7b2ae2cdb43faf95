"""AdamW on one tensor, in place, in one pass over its memory.

torch's fused kernel wants the gradient in the parameter's dtype and writes it back when it is scaled. This one reads a
bfloat16 gradient as it is and the clip factor from the device, and writes nothing but the parameter and its moments:
26 bytes an element instead of 34, with the copy to float32 before it; 18 where moments are kept in bfloat16.
"""

from functools import cache

import torch
from torch import Tensor

from ftrain.kernels import HAS_TRITON

MOMENTS = (torch.float32, torch.bfloat16)  # dtypes that the moments may be kept in
Scalars = tuple[float, float, float, float, float]  # what an update multiplies with: see adamw_


def adamw_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    factor: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    count: int,
) -> None:
    """One update of AdamW (arXiv:1711.05101, algorithm 2) in place, in float32. p: float32; g, m, v: float32 or
    bfloat16; one shape, contiguous. factor: float32 (), multiplies the gradient. count: the number of this update,
    from 1."""
    scalars = (
        1.0 - beta1,
        1.0 - beta2,
        1.0 - lr * weight_decay,
        lr / (1.0 - beta1**count),
        (1.0 - beta2**count) ** -0.5,
    )
    if runs_on(p):
        _launch(p, g, m, v, factor, beta1, beta2, eps, scalars)
    else:
        _plain(p, g, m, v, factor, beta1, beta2, eps, scalars)


def runs_on(x: Tensor) -> bool:
    """Whether the kernel can run where x is."""
    return x.is_cuda and HAS_TRITON


def _plain(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, factor: Tensor, beta1: float, beta2: float, eps: float, scalars: Scalars
) -> None:
    # Every product is rounded before it is added, as in the kernel: no fused multiply-add, on any device.
    one_minus_beta1, one_minus_beta2, decay, rate, correction = scalars
    g = g.float() * factor
    new_m = m.float() * beta1 + g * one_minus_beta1
    new_v = v.float() * beta2 + (g * g) * one_minus_beta2
    m.copy_(new_m)
    v.copy_(new_v)
    p.copy_(p * decay - (new_m / (new_v.sqrt() * correction + eps)) * rate)


def _launch(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, factor: Tensor, beta1: float, beta2: float, eps: float, scalars: Scalars
) -> None:
    n = p.numel()
    block = 1024
    with torch.cuda.device(p.device):
        _kernel()[(-(-n // block),)](
            p, g, m, v, factor, n, beta1, beta2, eps, *scalars, BLOCK=block, num_warps=4, enable_fp_fusion=False
        )


@cache
def _kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(
        p_ptr, g_ptr, m_ptr, v_ptr, factor_ptr, n, beta1, beta2, eps, one_minus_beta1, one_minus_beta2, decay, rate,
        correction, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        here = at < n
        g = tl.load(g_ptr + at, here, other=0.0).to(tl.float32) * tl.load(factor_ptr)
        m = tl.load(m_ptr + at, here, other=0.0).to(tl.float32) * beta1 + g * one_minus_beta1
        v = tl.load(v_ptr + at, here, other=0.0).to(tl.float32) * beta2 + (g * g) * one_minus_beta2
        step = tl.div_rn(m, tl.sqrt_rn(v) * correction + eps)
        p = tl.load(p_ptr + at, here, other=0.0) * decay - step * rate
        tl.store(m_ptr + at, m, here)
        tl.store(v_ptr + at, v, here)
        tl.store(p_ptr + at, p, here)

    return kernel
