"""fp8 formats, scales and the cast: the arithmetic everything else in this folder is built on.

A scale multiplies: ``codes = cast(x * scale)``, ``x ~ codes / scale``. Scales are float32 whatever the
tensor's dtype is: a bfloat16 scale moves codes by a whole step. None of these functions is to be
differentiated through; `linear.py` has the gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
MAX = {E4M3: 448.0, E5M2: 57344.0}

# A tensor of zeros has amax 0 and one of 1e-37 would need a scale beyond float32: both are clamped here,
# which keeps the scale (at most 5.7e16) and its reciprocal finite. It is torchao's constant too.
SMALLEST_AMAX = 1e-12


class Scaled(NamedTuple):
    """An fp8 tensor with its scale, and the place where its gradient goes.

    data: fp8 codes. scale: float32, of shape () or broadcastable against data. port: a high-precision tensor
    of data's shape and stride 0 (it holds one number); its dtype is the dtype its gradient will have. An fp8
    tensor must never carry a cotangent, because autograd would round the gradient to fp8: the port carries it.
    """

    data: Tensor
    scale: Tensor
    port: Tensor


def port_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of x's shape that occupies one number. The gradient it receives, of that dtype, is x's."""
    return _Port.apply(x, dtype)


@torch.compiler.allow_in_graph
class _Port(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros((), dtype=dtype, device=x.device).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None


def amax(x: Tensor, dim: int | None = None) -> Tensor:
    """max|x| in x's dtype: of the whole tensor (shape ()), or along one dim (kept, with size 1).

    NaN and Inf come through. An empty tensor has amax 0: it adds nothing to a maximum over ranks.
    """
    if dim is None:
        if x.numel() == 0:
            return x.new_zeros(())
        # By rows first: a compiler then takes them in the pass that makes x, and does not read x again.
        return (x.abs().amax(dim=-1) if x.ndim > 1 else x.abs()).amax()
    if x.shape[dim] == 0:
        return x.sum(dim=dim, keepdim=True)
    return x.abs().amax(dim=dim, keepdim=True)


def block_amax(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """max|x| of every tile of (rows, columns) in a matrix (R, C), in x's dtype.

    The result is (ceil(R / rows), ceil(C / columns)); tiles at the end may be smaller.
    """
    (r, c), (rows, columns) = x.shape, tile
    if x.numel() == 0:
        return x.new_zeros(-(-r // rows), -(-c // columns))
    whole = F.pad(x.abs(), (0, -c % columns, 0, -r % rows))
    return whole.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax(dim=(1, 3))


def spread(scale: Tensor, shape: torch.Size, tile: tuple[int, int]) -> Tensor:
    """One scale for every element of a matrix from one for every tile of it."""
    rows, columns = tile
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def scale_from_amax(amax: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    """The float32 scale that maps amax to the largest value of an fp8 dtype.

    The division is done in float64, so that eager and compiled code agree to the bit. A power-of-two scale is
    rounded *down* by masking its mantissa; ``exp2(floor(log2(scale)))`` rounds up just below a power of two.
    NaN or Inf in, NaN out: the cast that follows turns the tensor into NaN, and the step's finite check sees it.
    """
    wide = amax.to(torch.float64)
    scale = (MAX[dtype] / wide.clamp(min=SMALLEST_AMAX)).to(torch.float32)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(wide.isfinite(), scale, float("nan"))


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """fp8 codes of ``x * scale``, saturating: float32 multiply, clamp to the format's range, convert.

    x: any float dtype. scale: float32, broadcastable against x. Finite values beyond the range become the
    largest code. NaN and Inf become NaN in both formats: the clamp would turn Inf into a plausible 448, and
    e5m2 has an Inf that the next operation need not notice.
    """
    limit = MAX[dtype]
    scaled = (x.to(torch.float32) * scale).clamp(-limit, limit)
    return torch.where(x.isfinite(), scaled, float("nan")).to(dtype)


def dequantise(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that fp8 codes stand for: divided by their scale in float32, then converted to dtype."""
    return (data.to(torch.float32) / scale).to(dtype)
