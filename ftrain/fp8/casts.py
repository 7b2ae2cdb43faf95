"""From a recipe to codes: which casts a tensor needs, and the scales of several casts with one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ftrain import collectives
from ftrain.kernels import cast as kernel

from . import formats
from .formats import FORMATS
from .matmul import BLOCK
from .recipes import CONTRACTS, DIMS, Operand


class Codes(NamedTuple):
    """A matrix in fp8. scale: float32, (), or of size 1 along the dim that the product contracts.

    data_t: the transpose of data, contiguous, where it was made in the same pass.
    """

    data: Tensor
    scale: Tensor
    data_t: Tensor | None = None

    def t(self) -> Codes:
        """The transposed matrix; contiguous where `data_t` is known."""
        return Codes(self.data.t() if self.data_t is None else self.data_t, self.scale.t())


class Job(NamedTuple):
    """One cast to make. dim: what the product contracts. spans: whether the amax is one over all ranks.

    both: two products use the codes, one of them transposed.
    """

    matrix: Tensor
    operand: Operand
    dim: int
    spans: bool
    scale: Tensor | None
    both: bool = False
    tile: tuple[int, int] | None = None  # for block scales: the elements that share one


def shared(first: Operand | None, second: Operand | None) -> bool:
    """Whether one cast serves two products, which contract different dims."""
    return first is not None and first == second and first.granularity == "tensor"


def jobs(
    matrix: Tensor,
    name: str,
    split: str,
    uses: Sequence[tuple[str, Operand | None]],
    scale: Tensor | None = None,
    both: bool = False,
) -> list[Job]:
    """The casts of one matrix, "x", "w" or "g", for its uses: (product, operand), None for high precision.

    split: the letter of the dim that is split over the ranks, "" if none. scale: if it is known before. both:
    codes that two products share may be made with their transpose (not if they are to be gathered first). Two
    uses that can share a cast give one job, so the first job is the first use's and the last job the last's.
    """
    made: list[Job] = []
    for product, operand in uses:
        if operand is None:
            continue
        if made and shared(made[0].operand, operand):
            made[0] = made[0]._replace(both=both)
            continue
        contracted = CONTRACTS[product]
        spans = split != "" if operand.granularity == "tensor" else split == contracted
        dim, tile = DIMS[name].index(contracted), None
        if operand.granularity == "block":
            tile = (BLOCK, BLOCK) if name == "w" else (1, BLOCK) if dim == 1 else (BLOCK, 1)
        made.append(Job(matrix, operand, dim, spans, scale, tile=tile))
    return made


def cast_all(jobs: Sequence[Job], group: ProcessGroup | None) -> list[Codes]:
    """The codes of every job. Amaxes that span ranks share one all-reduce."""
    amaxes = {i: _amax(job) for i, job in enumerate(jobs) if job.scale is None}
    spanning = [i for i in amaxes if jobs[i].spans]
    if group is not None and spanning:
        flat = torch.cat([amaxes[i].reshape(-1) for i in spanning])
        reduced = collectives.all_reduce_max(flat, group).split([amaxes[i].numel() for i in spanning])
        for i, amax in zip(spanning, reduced, strict=True):
            amaxes[i] = amax.view(amaxes[i].shape)
    codes = []
    for i, job in enumerate(jobs):
        dtype, scale = FORMATS[job.operand.format], job.scale
        if scale is None:
            scale = formats.scale_from_amax(amaxes[i], dtype, job.operand.power_of_two)
        codes.append(_cast(job, scale, dtype))
    return codes


def _cast(job: Job, scale: Tensor, dtype: torch.dtype) -> Codes:
    scale = scale.detach()  # one that has a history is an input of the model, and no cast has a gradient
    if job.both and kernel.runs_on(job.matrix):
        data, data_t = kernel.cast_both(job.matrix, scale, dtype)
        return Codes(data, scale, data_t)
    each = scale if job.tile is None else formats.spread(scale, job.matrix.shape, job.tile)
    return Codes(formats.cast(job.matrix, each, dtype), scale)


def _amax(job: Job) -> Tensor:
    if job.tile is not None:
        return formats.block_amax(job.matrix, job.tile).float()
    return formats.amax(job.matrix, None if job.operand.granularity == "tensor" else job.dim).float()
