"""Delayed scaling: scales from the amaxes of earlier steps, as state that goes into a step and comes out.

The state is a dict: path of a weight to float32 (3, LENGTH), the latest amaxes first; the rows are x, w and
g. It advances once an optimizer step, by `update`, with the maximum over micro-batches and ranks. Amaxes of x
and g come out of the backward (see `linear.History`), those of w from the parameters, so neither
recomputation nor validation can advance it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from . import formats
from .formats import FORMATS
from .recipes import Operand, Recipe, operands

LENGTH = 16
TENSORS = ("x", "w", "g")

State = dict[str, Tensor]


class Triple(NamedTuple):
    """One number for each of a linear layer's three tensors: amaxes or scales, float32 ()."""

    x: Tensor
    w: Tensor
    g: Tensor


def init_state(paths: Iterable[str], length: int = LENGTH, device: torch.device | str = "cpu") -> State:
    """Empty histories, float32 (3, length): no amax was seen yet. A first step then scales dynamically (post.py)."""
    return {path: torch.zeros(len(TENSORS), length, dtype=torch.float32, device=device) for path in paths}


def scales(state: State, recipe: Recipe) -> dict[str, Triple]:
    """Every weight's three float32 0-d scales: the format's maximum over the largest amax of the history.

    A history without any amax (an all-zero gradient so far, say) gives 1.0. Margin is 0.
    """
    if not state:
        return {}
    paths, most = list(state), torch.stack(list(state.values())).amax(dim=-1)
    columns = []
    for i, tensor in enumerate(TENSORS):
        found = [operand for _, _, operand in operands(recipe, tensor)] or [Operand()]
        scale = formats.scale_from_amax(most[:, i], FORMATS[found[0].format], found[0].power_of_two)
        columns.append(torch.where(most[:, i] > 0, scale, 1.0))
    rows = torch.stack(columns, dim=1)
    return {path: Triple(*row.unbind()) for path, row in zip(paths, rows.unbind(), strict=True)}


def update(
    state: State,
    amaxes: dict[str, Triple],
    all_reduce_max: Callable[[Tensor], Tensor] | None = None,
) -> State:
    """The histories one step later. amaxes: what this rank observed, the maximum over its micro-batches.

    all_reduce_max: the maximum over all ranks, once for everything; None for one rank. An amax beyond the
    scale's range saturated the step's cast; it enters as it is, so the next scale fits it. One that is not
    finite does not enter (the newest entry is repeated): the NaN was in the step's data, and must not outlive
    it in a scale. Raises ValueError where the paths differ.
    """
    if state.keys() != amaxes.keys():
        odd = ", ".join(sorted(state.keys() ^ amaxes.keys()))
        raise ValueError(f"fp8 histories and observed amaxes are for different weights: {odd}.")
    if not state:
        return {}
    paths, histories = list(state), torch.stack(list(state.values()))
    seen = torch.stack([torch.stack([a.to(torch.float32) for a in amaxes[path]]) for path in paths])
    seen = torch.where(seen.isfinite(), seen, float("inf"))  # Inf survives every backend's maximum
    if all_reduce_max is not None:
        seen = all_reduce_max(seen.flatten()).view(seen.shape)
    seen = torch.where(seen.isfinite(), seen, histories[..., 0])
    moved = torch.cat([seen.unsqueeze(-1), histories[..., :-1]], dim=-1)
    return {path: history.clone() for path, history in zip(paths, moved.unbind(), strict=True)}
