"""Scales of all fp8 weights at once, after they were made: by the optimizer, by initialisation, by a load.

Scales are derived from parameters wherever parameters change, so none can be stale. They are the numbers that
a gather would find by itself, to the bit: a maximum does not depend on how its elements are grouped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import formats
from .formats import FORMATS
from .recipes import Operand


def weight_amaxes(
    shards: Sequence[Tensor], all_reduce_max: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """max|w| of every weight as one float32 vector, from this rank's shards, with one all-reduce.

    shards: local tensors of any float dtype; an empty one adds 0. all_reduce_max: maximum over all ranks that
    hold a part of any weight, None for one rank. A weight with NaN or Inf gives Inf: no backend's maximum
    drops Inf, and gloo's can drop NaN.
    """
    if not shards:
        return torch.zeros(0)
    full = [shard.detach() for shard in shards if shard.numel()]
    norms = iter(torch._foreach_norm(full, float("inf")) if full else [])
    zero = torch.zeros((), device=shards[0].device)
    amaxes = torch.stack([next(norms).to(torch.float32) if shard.numel() else zero for shard in shards])
    amaxes = torch.where(amaxes.isnan(), float("inf"), amaxes)
    return amaxes if all_reduce_max is None else all_reduce_max(amaxes)


def precompute_scales(
    shards: dict[str, Tensor],
    operand: Operand,
    all_reduce_max: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The float32 0-d scale of every weight, with one all-reduce for all of them.

    shards: path to this rank's shard, the same paths on every rank. operand: how a weight is cast, from
    `recipes.wire_operand`. A weight that is not finite gets the scale NaN, which its codes and products
    inherit.
    """
    paths = sorted(shards)
    amaxes = weight_amaxes([shards[path] for path in paths], all_reduce_max)
    scales = formats.scale_from_amax(amaxes, FORMATS[operand.format], operand.power_of_two)
    return dict(zip(paths, scales.unbind(), strict=True))


def cast_shards(shards: dict[str, Tensor], scales: dict[str, Tensor], operand: Operand) -> dict[str, Tensor]:
    """The fp8 codes of every shard, to be cached between gathers so that a step's gathers cast nothing.

    Casting a shard and gathering the codes gives the codes of the gathered weight.
    """
    return {
        path: formats.cast(shard.detach(), scales[path], FORMATS[operand.format])
        for path, shard in shards.items()
    }
