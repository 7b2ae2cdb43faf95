"""The linear layers of a block, whatever they run in and however they are split.

A block asks for two things. `column(x, *weights)` multiplies one input with several weights whose rows are split over
`tensor`; `row(x, weight)` multiplies with a weight whose columns are. Between blocks the sequence is split over
`tensor` too: column gathers it, row scatters it. On one rank both are plain products.

The weight says how it is multiplied: a tensor in its own dtype, an `Fp8Weight` as the fp8 recipe says.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ftrain import fp8
from ftrain.collectives import Group, all_gather, reduce_scatter
from ftrain.fp8.state import Fp8Weight


class Linear(NamedTuple):
    """The two products of a block, and the group of n ranks that splits them (None on one rank).

    column: (x (B, S/n, D), weights (F/n, D)...) -> one (B, S, F/n) for each weight.
    row: (x (B, S, F/n), weight (D, F/n)) -> (B, S/n, D).
    """

    column: Callable[..., tuple[torch.Tensor, ...]]
    row: Callable[[torch.Tensor, torch.Tensor | Fp8Weight], torch.Tensor]
    group: Group


def make_linear(recipe: fp8.Recipe = fp8.NONE, group: Group = None) -> Linear:
    """The products over `group`; weights that come as `Fp8Weight` are multiplied as `recipe` says."""

    def column(x_BSD: torch.Tensor, *weights_FD: torch.Tensor | Fp8Weight) -> tuple[torch.Tensor, ...]:
        in_fp8 = [w for w in weights_FD if isinstance(w, Fp8Weight)]
        products = iter(_fp8_column(x_BSD, in_fp8, recipe, group) if in_fp8 else ())
        if len(in_fp8) < len(weights_FD):
            x_BSD = all_gather(x_BSD, 1, group)
        return tuple(next(products) if isinstance(w, Fp8Weight) else F.linear(x_BSD, w) for w in weights_FD)

    def row(x_BSF: torch.Tensor, weight_DF: torch.Tensor | Fp8Weight) -> torch.Tensor:
        if isinstance(weight_DF, Fp8Weight):
            return fp8.row(x_BSF, weight_DF.weight, recipe, group, x_history=weight_DF.x, g_history=weight_DF.g)
        return reduce_scatter(F.linear(x_BSF, weight_DF), 1, group)

    return Linear(column, row, group)


def _fp8_column(
    x_BSD: torch.Tensor, weights: list[Fp8Weight], recipe: fp8.Recipe, group: Group
) -> tuple[torch.Tensor, ...]:
    """`fp8.column` with the histories that the weights carry: of x the first one's, of its gradient each one's own."""
    g_histories = [w.g for w in weights if w.g is not None]
    tensors = [w.weight for w in weights]
    return fp8.column(x_BSD, tensors, recipe, group, x_history=weights[0].x, g_histories=g_histories or None)
