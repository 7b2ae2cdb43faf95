"""Collective functions with their transposes.

Each is a pure function of this rank's tensor and a process group; its backward is the partner named beside it. They
work under torch.func and inside torch.compile, over gloo and NCCL. A group of None means this rank is alone: every
function is then the identity, and moves nothing.

    all_gather      <->  reduce_scatter
    all_reduce      <->  replicated      (identity forward, gradient summed)

Sums are always sums, never averages: gloo's AVG has divided by nothing before, and a loss that is already divided by
the global token count needs no other factor.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

Group = dist.ProcessGroup | None

# torch 2.13 renamed these and warns of the old names. The first two write into a tensor that they are given and can
# be left in flight: what fsdp.py's buffers need.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def all_gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's piece and its peers', joined along `dim` in rank order. Backward: `reduce_scatter`."""
    return x if group is None else _AllGather.apply(x, dim, group)


def reduce_scatter(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The sum of `x` over the group, of which each rank keeps its piece along `dim`. Backward: `all_gather`.

    `dim` must be a multiple of the group's size.
    """
    return x if group is None else _ReduceScatter.apply(x, dim, group)


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of `x` over the group, on every rank. Backward: identity, since every rank's loss is the one loss."""
    return x if group is None else _AllReduce.apply(x, group)


def replicated(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`x`, equal on all ranks and used by each for its own part: identity forward. Backward: `all_reduce`."""
    return x if group is None else _Replicated.apply(x, group)


def all_reduce_max(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The maximum of `x` over the group, on every rank. Not differentiable; NaN on any rank is NaN on all.

    gloo's MAX may drop a NaN, so where there is one, a flag travels beside the value.
    """
    x = x.detach()
    if group is None:
        return x
    is_nan = torch.isnan(x)
    both = torch.stack([x.masked_fill(is_nan, float("-inf")), is_nan.to(x.dtype)])
    value, is_nan = functional.wait_tensor(functional.all_reduce(both, "max", group)).unbind()
    return value.masked_fill(is_nan > 0, float("nan"))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        return functional.wait_tensor(_gather(x.contiguous(), dim, group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.dim, ctx.group = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _ReduceScatter.apply(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        return functional.wait_tensor(_scatter(x.contiguous(), "sum", dim, group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.dim, ctx.group = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllGather.apply(grad, ctx.dim, ctx.group), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Replicated.apply(grad, ctx.group), None


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllReduce.apply(grad, ctx.group), None
