"""What fp8 tensor parallelism moves along the sequence: codes as bytes, and one gradient back.

A tensor here is a matrix of tokens, (B * S, C), whose sequence is split over a group: each rank holds (B * S/n, C).
A group of None is this rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ftrain import collectives
from ftrain.collectives import Group


def gather(matrix: Tensor, lead: Sequence[int], group: Group) -> Tensor:
    """(B * S/n, C) of every rank to (B * S, C), each sequence in its order. Not differentiable.

    lead: the leading shape (..., S/n) of this rank's tokens. fp8 travels as bytes.
    """
    if group is None:
        return matrix
    n, b, s, c = group.size(), prod(lead[:-1]), lead[-1], matrix.shape[1]
    wire = matrix.view(torch.uint8) if matrix.element_size() == 1 else matrix
    got = collectives.all_gather(wire, 0, group)
    got = got.view(n, b, s, c).transpose(0, 1).reshape(n * b * s, c)
    return got.view(matrix.dtype)


def gather_codes(data: Tensor, scale: Tensor, lead: Sequence[int], group: Group) -> tuple[Tensor, Tensor]:
    """Codes of all ranks, and their scale: gathered if it is by token; any other is equal on all ranks."""
    by_token = scale.ndim == 2 and scale.shape[0] == data.shape[0] and scale.shape[1] == 1
    return gather(data, lead, group), gather(scale, lead, group) if by_token else scale


def gathered_port(x: Tensor, group: Group) -> Tensor:
    """A port of the shape that x (..., S/n, C) has once gathered. Its gradient is reduce-scattered to x."""
    return _GatheredPort.apply(x, group)


@torch.compiler.allow_in_graph
class _GatheredPort(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        zero = torch.zeros((), dtype=x.dtype, device=x.device)
        ranks = 1 if group is None else group.size()
        return zero.expand(*x.shape[:-2], x.shape[-2] * ranks, x.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return collectives.reduce_scatter(grad, grad.ndim - 2, ctx.group), None
