"""How much a cast loses: signal to noise, and what saturated or vanished."""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats


def sqnr(reference: Tensor, value: Tensor) -> Tensor:
    """Signal to noise in dB, float64 (): 20 log10(|reference| / |reference - value|). Inf where equal."""
    reference, value = reference.to(torch.float64), value.to(torch.float64)
    return 20 * torch.log10(reference.norm() / (reference - value).norm())


def cast_loss(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The shares of x's elements that a cast saturates and that it flushes to zero, each float32 ()."""
    scaled = x.to(torch.float32) * scale
    codes = formats.cast(x, scale, dtype).to(torch.float32)
    saturated = (scaled.abs() > formats.MAX[dtype] * (1 + 1e-6)).sum()  # not by a rounding of the scale
    flushed = ((codes == 0) & (x != 0)).sum()
    count = max(x.numel(), 1)
    return saturated.to(torch.float32) / count, flushed.to(torch.float32) / count
