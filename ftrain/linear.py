"""The linear layers of a block, whatever they run in and however they are split.

A block asks for two things. `column(x, *weights)` multiplies one input with several weights whose rows are split over
`tensor`; `row(x, weight)` multiplies with a weight whose columns are. Between blocks the sequence is split over
`tensor` too: column gathers it, row scatters it. On one rank both are plain products.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ftrain.collectives import Group, all_gather, reduce_scatter


class Linear(NamedTuple):
    """The two products of a block, and the group that splits them (None on one rank)."""

    column: Callable[..., tuple[torch.Tensor, ...]]
    row: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    group: Group


def high_precision(group: Group = None) -> Linear:
    """Products in the compute dtype."""

    def column(x_BSD: torch.Tensor, *weights_FD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x_BSD = all_gather(x_BSD, 1, group)
        return tuple(F.linear(x_BSD, weight_FD) for weight_FD in weights_FD)

    def row(x_BSF: torch.Tensor, weight_DF: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(F.linear(x_BSF, weight_DF), 1, group)

    return Linear(column, row, group)
