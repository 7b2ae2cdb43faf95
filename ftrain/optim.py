"""Optimizers by optax's contract: a pair of pure functions over parameter trees, small enough to compose.

    optimizer = chain(clip_by_global_norm(1.0), adamw(schedule("cosine", 3e-4, steps=1000, warmup_steps=100)))
    state = optimizer.init(params)
    updates, state = optimizer.update(grads, state, params)
    params = apply_updates(params, updates)

`step` does the last two lines at once. A transform that only multiplies the gradient by a number (`factor`)
and a rule that can write the new parameters itself (`apply`) say so, and a chain of them is one pass over
memory: nothing is scaled, clipped or updated in a buffer of its own. Any other chain takes the two lines,
with the same numbers.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ftrain import tree
from ftrain.fused import adamw_, wide
from ftrain.schedules import Schedule, schedule
from ftrain.tree import Tree

__all__ = [
    "AdamState",
    "Optimizer",
    "Schedule",
    "SgdState",
    "adamw",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "global_norm",
    "schedule",
    "sgd",
    "step",
]


class Optimizer(NamedTuple):
    """A gradient transform. The first two functions are the contract; the others are what `step` can use.

    init: params -> state.
    update: (grads, state, params) -> (updates, state); updates are added to the parameters.
    norm: grads -> their global norm, 0-d fp32, where the transform looks at it.
    factor: norm of the incoming gradient -> 0-d tensor or float, for a transform without state that does
        nothing but multiply the gradient by it.
    apply: (grads, state, params, *, scale, norm, donate) -> (params, state): `update` and `apply_updates` of
        gradients times `scale` (0-d tensor or None), whose norm is then `norm`.
    lr: state -> the learning rate of the next update.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    norm: Callable[[Tree], torch.Tensor] | None = None
    factor: Callable[[torch.Tensor], torch.Tensor | float] | None = None
    apply: Callable[..., tuple[Tree, Tree]] | None = None
    lr: Callable[[Tree], float] | None = None


class AdamState(NamedTuple):
    """count: updates made; mu, nu: moments, fp32 (fp64 for fp64 parameters) unless `adamw` was asked for another
    dtype, in the structure of params."""

    count: int  # type: ignore[assignment]  # tuple.count has no use here
    mu: Tree
    nu: Tree


class SgdState(NamedTuple):
    """count: updates made; mu: the momentum, fp32, in the structure of params (None without)."""

    count: int  # type: ignore[assignment]  # tuple.count has no use here
    mu: Tree


@torch.no_grad()
def step(
    optimizer: Optimizer,
    grads: Tree,
    state: Tree,
    params: Tree,
    *,
    scale: torch.Tensor | None = None,
    donate: bool = False,
    skip_nonfinite: bool = False,
) -> tuple[Tree, Tree, dict[str, Any]]:
    """One update: (params, state, stats).

    scale: 0-d fp32, multiplies the gradients first (1 / number of tokens, say).
    donate: the buffers of grads, state and params may be reused; use only what is returned. Where the
        optimizer has `apply`, the tensors returned are those passed in. Without donate, inputs keep their
        values.
    skip_nonfinite: where the norm is not finite, params and state come back as they went in. Waits for the
        norm.
    stats: grad_norm, 0-d fp32, of the scaled gradient before clipping; lr, a float (nan where there is none).
    Raises ValueError naming the path when the trees differ in structure or shapes.
    """
    _check_same(params, grads)
    norm = (optimizer.norm or global_norm)(grads)
    norm = norm if scale is None else norm * scale
    stats = {"grad_norm": norm, "lr": optimizer.lr(state) if optimizer.lr else math.nan}
    if skip_nonfinite and not bool(torch.isfinite(norm)):
        return params, state, stats
    if optimizer.apply is not None:
        params, state = optimizer.apply(grads, state, params, scale=scale, norm=norm, donate=donate)
        return params, state, stats
    if scale is not None:
        grads = tree.map(lambda grad: grad * scale, grads)
    updates, state = optimizer.update(grads, state, params)
    return apply_updates(params, updates), state, stats


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """params + updates in the updates' precision, in the dtypes of params. ValueError names a path."""
    _check_same(params, updates)
    return tree.map(lambda p, u: (p.to(u.dtype) + u).to(p.dtype), params, updates)


def chain(*transforms: Optimizer) -> Optimizer:
    """The transforms one after another, each on the updates of the one before. State: a tuple of theirs."""

    def init(params: Tree) -> tuple:
        return tuple(transform.init(params) for transform in transforms)

    def update(grads: Tree, state: tuple, params: Tree) -> tuple[Tree, tuple]:
        new = []
        for transform, part in zip(transforms, state, strict=True):
            grads, part = transform.update(grads, part, params)
            new.append(part)
        return grads, tuple(new)

    norms = [transform.norm for transform in transforms if transform.norm is not None]
    one_norm = all(norm is norms[0] for norm in norms)
    factors = [transform.factor for transform in transforms if transform.factor is not None]
    before = [transform.factor for transform in transforms[:-1] if transform.factor is not None]
    write = transforms[-1].apply if transforms else None
    rates = [(i, transform.lr) for i, transform in enumerate(transforms) if transform.lr is not None]

    def factor(norm: torch.Tensor) -> torch.Tensor | float:
        return _product_of(factors, norm)

    def apply(
        grads: Tree, state: tuple, params: Tree, *, scale: torch.Tensor | float | None, norm: torch.Tensor, donate: bool
    ) -> tuple[Tree, tuple]:
        assert write is not None
        if before:
            by = _product_of(before, norm)
            scale, norm = (by if scale is None else scale * by), norm * by
        params, last = write(grads, state[-1], params, scale=scale, norm=norm, donate=donate)
        return params, (*state[:-1], last)

    def lr(state: tuple) -> float:
        i, rate = rates[-1]
        return rate(state[i])

    multiplies = one_norm and len(factors) == len(transforms)
    applies = one_norm and write is not None and len(before) == len(transforms) - 1
    return Optimizer(
        init,
        update,
        norm=norms[0] if norms else None,
        factor=factor if multiplies else None,
        apply=apply if applies else None,
        lr=lr if rates else None,
    )


def _product_of(factors: list[Callable], norm: torch.Tensor) -> torch.Tensor | float:
    """The factors one after another; each is asked about the norm that the ones before leave."""
    total: torch.Tensor | float = 1.0
    for factor in factors:
        total = total * factor(norm * total)
    return total


def global_norm(grads: Tree) -> torch.Tensor:
    """The L2 norm of all leaves together: 0-d, fp32 (fp64 for fp64 leaves). Empty leaves count nothing."""
    leaves = [leaf for leaf in tree.leaves(grads) if leaf.numel()]
    if not leaves:
        return torch.zeros((), device=next((leaf.device for leaf in tree.leaves(grads)), None))
    dtype = torch.promote_types(leaves[0].dtype, torch.float32)  # squares of bf16 gradients need fp32 sums
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(leaves, 2, dtype)))


def clip_by_global_norm(max_norm: float, norm: Callable[[Tree], torch.Tensor] = global_norm) -> Optimizer:
    """Scale the whole gradient down to `max_norm` where its norm is larger. inf: never; the norm is still seen.

    norm: the norm function; a sharded tree needs one that adds over ranks.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_by_global_norm({max_norm}): the largest norm must be above 0 (inf: no clipping)")

    def factor(norm: torch.Tensor) -> torch.Tensor | float:
        # A norm of 0 gives inf, and 1 after the clamp. A NaN stays one: it must not look like a gradient.
        return 1.0 if math.isinf(max_norm) else (max_norm / norm).clamp(max=1.0)

    def update(grads: Tree, state: tuple, params: Tree) -> tuple[Tree, tuple]:
        by = factor(norm(grads))
        return tree.map(lambda grad: grad * by, grads), state

    return Optimizer(lambda params: (), update, norm=norm, factor=factor)


def adamw(
    lr: float | Schedule,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    moments: torch.dtype = torch.float32,
) -> Optimizer:
    """Adam with decoupled weight decay (arXiv:1711.05101, algorithm 2), the same numbers as
    torch.optim.AdamW.

    mask: which leaves decay, a tree of bools or a function from params to one. Default: those of two dims or
        more, so that norms do not.
    moments: the dtype in which moments are kept between updates (at least float32 for parameters wider than that).
        In bfloat16 each is rounded to nearest once an update; the arithmetic stays in float32. Raises ValueError for
        betas so near 1 that a moment's decay would be rounded away.
    """
    beta1, beta2 = betas
    rate = _as_schedule(lr)
    _check_decays("adamw", betas, moments)

    def init(params: Tree) -> AdamState:
        _check_leaves(params)
        mu, nu = (tree.map(lambda param: _moment(param, moments), params) for _ in range(2))
        return AdamState(0, mu, nu)

    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        _check_same(params, grads)
        count = state.count + 1
        now, first, second = rate(count), 1 - beta1**count, math.sqrt(1 - beta2**count)

        def change(m: torch.Tensor, v: torch.Tensor, p: torch.Tensor, decays: bool) -> torch.Tensor:
            adam = m / (v.sqrt() / second + eps) * (-now / first)
            return adam - now * weight_decay * p if decays else adam

        mu, nu = tree.map(wide, state.mu), tree.map(wide, state.nu)
        mu = tree.map(lambda m, g: m.lerp(g.to(m.dtype), 1 - beta1), mu, grads)
        nu = tree.map(lambda v, g: v * beta2 + (1 - beta2) * g.to(v.dtype).square(), nu, grads)
        updates = tree.map(change, mu, nu, params, _decaying(mask, params))
        mu, nu = (tree.map(lambda new, old: new.to(old.dtype), *pair) for pair in ((mu, state.mu), (nu, state.nu)))
        return updates, AdamState(count, mu, nu)

    def apply(
        grads: Tree,
        state: AdamState,
        params: Tree,
        *,
        scale: torch.Tensor | float | None,
        norm: torch.Tensor,
        donate: bool,
    ) -> tuple[Tree, AdamState]:
        for moments in (state.mu, state.nu):
            tree.check_same_structure(params, moments)
        count = state.count + 1
        p, treedef = tree.flatten(params)
        g, m, v = tree.leaves(grads), tree.leaves(state.mu), tree.leaves(state.nu)
        if not donate:
            p, m, v = ([leaf.clone() for leaf in leaves] for leaves in (p, m, v))
        decays = [bool(leaf) for leaf in tree.leaves(_decaying(mask, params))]
        constants = {"lr": rate(count), "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        adamw_(p, g, m, v, decays, scale=scale, keep_grads=not donate, count=count, **constants)
        new = (tree.unflatten(treedef, leaves) for leaves in (p, m, v))
        return next(new), AdamState(count, *new)

    return Optimizer(init, update, apply=apply, lr=lambda state: rate(state.count + 1))


def sgd(
    lr: float | Schedule,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    moments: torch.dtype = torch.float32,
) -> Optimizer:
    """Gradient descent with heavy-ball momentum and decoupled weight decay. `mask` and `moments` as in `adamw`."""
    rate = _as_schedule(lr)
    _check_decays("sgd", (momentum,), moments)

    def init(params: Tree) -> SgdState:
        _check_leaves(params)
        return SgdState(0, tree.map(lambda param: _moment(param, moments), params) if momentum else None)

    def update(grads: Tree, state: SgdState, params: Tree) -> tuple[Tree, SgdState]:
        _check_same(params, grads)
        now = rate(state.count + 1)
        mu = tree.map(lambda m, g: wide(m) * momentum + g, state.mu, grads) if momentum else None

        def change(m: torch.Tensor, p: torch.Tensor, decays: bool) -> torch.Tensor:
            return -now * (m + weight_decay * p if decays else m)

        updates = tree.map(change, mu if momentum else grads, params, _decaying(mask, params))
        mu = tree.map(lambda new, old: new.to(old.dtype), mu, state.mu) if momentum else None
        return updates, SgdState(state.count + 1, mu)

    return Optimizer(init, update, lr=lambda state: rate(state.count + 1))


# --- what the rules share -----------------------------------------------------------------------------


def _as_schedule(lr: float | Schedule) -> Schedule:
    return lr if callable(lr) else lambda step: lr


def _check_decays(name: str, betas: tuple[float, ...], moments: torch.dtype) -> None:
    """Raises ValueError where a moment kept as `moments` would not decay: rounding to nearest undoes a change of less
    than half of a unit in the last place, up to eps / 2 of the moment."""
    most = 1 - torch.finfo(moments).eps / 2
    if max(betas) > most:
        raise ValueError(
            f"{name}: betas={betas} with {str(moments).removeprefix('torch.')} moments: a moment that decays by "
            f"{1 - max(betas):.2g} an update is rounded back to what it was; use betas up to {most:g}, or float32"
        )


def _moment(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.promote_types(param.dtype, torch.float32)
    return torch.zeros_like(param, dtype=dtype if wide == torch.float32 else wide)


def _decaying(mask: Tree | Callable[[Tree], Tree] | None, params: Tree) -> Tree:
    if mask is None:
        return tree.map(lambda p: p.ndim >= 2, params)
    chosen = mask(params) if callable(mask) else mask
    tree.check_same_structure(params, chosen)
    return chosen


def _check_leaves(params: Tree) -> None:
    for path, leaf in tree.named_leaves(params):
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            what = f"a {leaf.dtype} tensor" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
            raise ValueError(f"{path} is {what}; an optimizer needs floating-point tensors")


def _check_same(params: Tree, other: Tree) -> None:
    """Leaves must pair, and in one shape: broadcasting would make a wrong gradient look right."""
    tree.check_same_structure(params, other)
    for i, (p, g) in enumerate(zip(tree.leaves(params), tree.leaves(other), strict=True)):
        if p.shape != g.shape:
            path = tree.names(params)[i]
            raise ValueError(f"{path}: the parameter is {tuple(p.shape)}, its gradient or update {tuple(g.shape)}")
