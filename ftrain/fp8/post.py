"""What runs after the optimizer: scales, cached codes and histories, derived from the parameters just made.

`make_post` gives a pure transform, state -> state, that costs one all-reduce for the whole model. It runs wherever
parameters are made (initialisation, a step, a load), so no scale can be stale; run twice, it changes nothing. Its
scales are the numbers that a gather would find by itself, to the bit: a maximum does not depend on how its elements are
grouped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftrain import tree
from ftrain.sharding import to_local

from . import delayed, formats
from .formats import FORMATS
from .linear import History
from .recipes import Recipe, operands, uses_history, wire_operand
from .state import WeightState


class Fp8State(NamedTuple):
    """The fp8 part of a train state.

    weights: a tree like the parameters', of WeightState or None. Derived: not in a checkpoint.
    history: with delayed scaling, a tree like the parameters' of float32 (3, 16): the latest amaxes of x, w and g of
        every fp8 weight. This is state: it is in the checkpoint.
    observed: between the step and the post transform, the amaxes that the step saw, where its weights' ports are.
    """

    weights: Any
    history: Any | None = None
    observed: Any | None = None

    @property
    def stored(self) -> Fp8State | None:
        """What of it a checkpoint holds: the histories. The rest is derived again where it is loaded."""
        return None if self.history is None else Fp8State(None, self.history)


def make_post(
    recipe: Recipe,
    abstract: Any,
    runs: Callable[[str], bool],
    *,
    precompute: bool,
    cache: bool,
    codes_travel: bool,
    wire_dtype: torch.dtype,
    all_reduce_max: Callable[[Tensor], Tensor] | None = None,
    cast: Callable = formats.cast,
) -> Callable[[Any], Any] | None:
    """The post transform of a train state whose parameters are declared by `abstract`; None where there is none.

    runs: path -> whether fp8 multiplies that weight. precompute: make its scale. cache: cast this rank's shard too.
    codes_travel: whether codes are gathered; if not, weights travel in `wire_dtype` and are cast on arrival, so
        that their amax is that of the rounded weight. all_reduce_max: over all ranks; None for one.
    """
    operand, with_history = wire_operand(recipe), uses_history(recipe)
    w_history = with_history and operands(recipe, "w")[0][2].scale == "history"
    precompute = operand is not None and (precompute or w_history)
    paths = [path for path in tree.names(abstract) if runs(path)]
    if not paths or not (precompute or with_history):
        return None

    def post(state: Any) -> Any:
        old = state.fp8_state or Fp8State(None)
        local = dict(tree.named_leaves(to_local(state.params)))
        amaxes = weight_amaxes([local[path] for path in paths])
        if not codes_travel:
            amaxes = amaxes.to(wire_dtype).float()  # rounding keeps order: the amax of the rounded is the rounded amax
        history: delayed.State | None = None
        scales: dict[str, delayed.Triple] = {}
        w_scales: dict[str, Tensor] = {}
        nothing_seen = _nothing_seen(old, state.step)
        if with_history:
            history = _advance(old, dict(zip(paths, amaxes.unbind(), strict=True)), nothing_seen, all_reduce_max)
            scales = delayed.scales(history, recipe)
        if w_history:
            w_scales = {path: scales[path].w for path in paths}
        elif precompute and operand is not None:
            amaxes = amaxes if all_reduce_max is None else all_reduce_max(amaxes)
            made = formats.scale_from_amax(amaxes, FORMATS[operand.format], operand.power_of_two)
            w_scales = dict(zip(paths, made.unbind(), strict=True))

        def weight(path: str, _: Any) -> WeightState | None:
            if not runs(path):
                return None
            scale = w_scales.get(path)
            codes = None
            if cache and codes_travel and precompute and operand is not None:
                codes = cast(local[path], scale, FORMATS[operand.format])
            if not with_history:
                return WeightState(scale, codes)
            # Before a first step nothing was seen of x and g: that step scales them by their own amax.
            known = (None, None) if nothing_seen else (scales[path].x, scales[path].g)
            x, g = (History(s, torch.zeros((), device=amaxes.device)) for s in known)
            return WeightState(scale, codes, x, g)

        weights = tree.map_named(weight, abstract)
        nested = None if history is None else _nested(history, abstract)
        return state._replace(fp8_state=Fp8State(weights, nested))

    return post


def weight_amaxes(shards: Sequence[Tensor]) -> Tensor:
    """max|w| of this rank's shard of every weight, as one float32 vector. shards: of any float dtype, one at least.

    An empty shard gives 0. One with NaN or Inf gives Inf: no backend's maximum drops Inf, and gloo's can drop NaN.
    """
    full = [shard.detach() for shard in shards if shard.numel()]
    norms = iter(torch._foreach_norm(full, float("inf")) if full else [])
    zero = torch.zeros((), device=shards[0].device)
    amaxes = torch.stack([next(norms).to(torch.float32) if shard.numel() else zero for shard in shards])
    return torch.where(amaxes.isnan(), float("inf"), amaxes)


def _nested(history: delayed.State, abstract: Any) -> Any:
    return tree.map_named(lambda path, _: history.get(path), abstract)


def _nothing_seen(state: Fp8State, step: int) -> bool:
    """Whether no step has observed x and g since the histories began (at step 0, or at a load that had none)."""
    if state.observed is not None:
        return False
    if state.weights is not None:
        return not any(path.endswith(".x.scale") for path in tree.names(state.weights))
    return state.history is None or step == 0


def _advance(
    old: Fp8State, w_amaxes: dict[str, Tensor], nothing_seen: bool, all_reduce_max: Callable | None
) -> delayed.State:
    """The histories, path -> (3, 16): one step on if the step observed anything, as they were if not."""
    if nothing_seen:
        device = next(iter(w_amaxes.values())).device
        zero = torch.zeros((), device=device)
        state = delayed.init_state(w_amaxes, device=device)
        return delayed.update(state, {p: delayed.Triple(zero, w, zero) for p, w in w_amaxes.items()}, all_reduce_max)
    state = dict(tree.named_leaves(old.history))
    if old.observed is None:
        return state
    seen = dict(tree.named_leaves(old.observed))
    triples = {p: delayed.Triple(seen[f"{p}.x.port"], w, seen[f"{p}.g.port"]) for p, w in w_amaxes.items()}
    return delayed.update(state, triples, all_reduce_max)
