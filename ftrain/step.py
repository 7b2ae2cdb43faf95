"""The train step: state and batch in, state and metrics out.

    gradients of every micro-batch, summed -> one reduction of what is replicated -> the optimizer -> post transforms

Everything that changes between two steps is in the `TrainState` that goes in and comes out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ftrain import optim, tree
from ftrain.marks import UPDATE, Mark, unmarked
from ftrain.sharding import Mesh, Plan, like, to_local
from ftrain.transforms import accumulate, add, grad_and_value, maximum
from ftrain.tree import Tree


class TrainState(NamedTuple):
    """All that a step changes. step: how many were taken. params, opt_state: on a mesh their tensors are DTensors.

    fp8_state: what the post transforms keep for fp8 (fp8.post.Fp8State); None without fp8.
    """

    step: int
    params: Tree
    opt_state: Tree
    fp8_state: Tree | None = None


def init_state(params: Tree, optimizer: optim.Optimizer, post: tuple[Callable, ...] = ()) -> TrainState:
    """The state before the first step: fresh moments, and whatever the post transforms derive from the parameters."""
    opt_state = like_params(optimizer.init(to_local(params)), params)
    return apply_post(TrainState(0, params, opt_state), post)


def stored(state: TrainState) -> TrainState:
    """What of a state a checkpoint holds: all but what the post transforms derive. Undone by `apply_post`."""
    return state._replace(fp8_state=state.fp8_state and state.fp8_state.stored)


def apply_post(state: TrainState, post: tuple[Callable, ...]) -> TrainState:
    """Run the post transforms, `state -> state`, in order. They derive; calling them again changes nothing."""
    for transform in post:
        state = transform(state)
    return state


def make_train_step(
    loss: Callable,
    optimizer: optim.Optimizer,
    post: tuple[Callable, ...] = (),
    *,
    mesh: Mesh | None = None,
    plans: Tree | None = None,
    micro_batches: int = 1,
    donate: bool = False,
    skip_nonfinite: bool = False,
    mark: Mark = unmarked,
    prepare: Callable[[Tree], Tree] = lambda params: params,
) -> Callable[[TrainState, dict], tuple[TrainState, dict]]:
    """A pure `step(state, batch) -> (state, metrics)`.

    loss: (params, batch) -> (sum of token losses, number of tokens); with an fp8 state also `fp8=`. Differentiated by
        torch.func at this rank's parameters.
    batch: a dict of tensors with this rank's sequences along dim 0, cut in `micro_batches` equal parts. Losses are
        summed and divided by the token count of all ranks once, so how sequences are spread changes nothing.
    post: transforms of the new state, such as fp8's precomputed scales.
    donate: reuse the buffers of the state passed in, as jax.jit's donate_argnums does. The parameters and moments of
        the old state then hold the new values: use only the state that comes out.
    skip_nonfinite: where the loss or the gradient's norm is not finite, on any rank, nothing but `step` changes.
    mark: names what runs, for a profile (marks.py).
    prepare: params -> what the loss is given and differentiated at, so that work which every micro-batch would do again
        is done once (Execution.prepare).
    metrics: loss (mean per token over all ranks), grad_norm (global, before clipping), tokens: 0-d tensors; lr: float.
        Where no token counts, the loss and the gradient are 0. With skip_nonfinite also skipped: bool; grad_norm is
        then NaN where the loss is not finite.

    Raises ValueError when the batch does not divide in `micro_batches`.
    """
    mesh = mesh or Mesh()

    def step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        params = to_local(state.params)
        # fp8 histories learn what a step saw through ports, inputs whose cotangent is an amax (fp8/linear.py).
        weights = state.fp8_state and state.fp8_state.weights
        ports, known = tree.partition(lambda path, _: path.endswith(".port"), weights)

        def value(inputs: tuple[Tree, Tree], micro: dict) -> tuple[torch.Tensor, torch.Tensor]:
            params, ports = inputs
            kwargs = {} if weights is None else {"fp8": tree.combine(ports, known)}
            return _tensors(*loss(params, micro, **kwargs))

        summed = accumulate(value, split(batch, micro_batches), _combine)
        (grads, observed), (_, values) = grad_and_value(summed)((prepare(params), ports))
        total, count = _over_ranks(values, mesh)
        if mesh.shape.tensor > 1:
            grads = sum_over_tensor(grads, plans, mesh)
        scale = 1.0 / count.clamp(min=1)
        if skip_nonfinite:  # one number decides, the same on all ranks: a bad loss spoils the norm
            scale = torch.where(total.isfinite(), scale, torch.nan)
        with mark(UPDATE, "optimizer"):
            params, opt_state, stats = optim.step(
                optimizer,
                grads,
                to_local(state.opt_state),
                params,
                scale=scale,
                donate=donate,
                skip_nonfinite=skip_nonfinite,
            )
        metrics = {
            "loss": total / count.clamp(min=1),
            "grad_norm": stats["grad_norm"],
            "lr": stats["lr"],
            "tokens": count,
        }
        if skip_nonfinite:
            metrics["skipped"] = not bool(metrics["grad_norm"].isfinite())
            if metrics["skipped"]:
                return state._replace(step=state.step + 1), metrics
        fp8_state = state.fp8_state and state.fp8_state._replace(observed=observed if tree.leaves(ports) else None)
        new = TrainState(state.step + 1, like(params, state.params), like(opt_state, state.opt_state), fp8_state)
        with mark(UPDATE, "post"):
            return apply_post(new, post), metrics

    return step


def make_eval_step(loss: Callable, *, mesh: Mesh | None = None) -> Callable[[TrainState, dict], tuple]:
    """`evaluate(state, batch) -> (sum of token losses, number of tokens)` over all ranks, as fp64 0-d tensors."""
    mesh = mesh or Mesh()

    def evaluate(state: TrainState, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        kwargs = {} if state.fp8_state is None else {"fp8": state.fp8_state.weights}
        with torch.no_grad():
            pair = _tensors(*loss(to_local(state.params), batch, **kwargs))
            return _over_ranks([pair], mesh, torch.float64)

    return evaluate


def split(batch: dict, parts: int) -> list[dict]:
    """Cut every tensor of a batch in `parts` equal pieces along dim 0. Raises ValueError where it does not divide."""
    size = len(next(iter(batch.values())))
    if size % parts:
        raise ValueError(f"{size} sequences on this rank do not divide in {parts} micro-batches")
    pieces = {key: value.split(size // parts) for key, value in batch.items()}
    return [{key: piece[i] for key, piece in pieces.items()} for i in range(parts)]


def like_params(opt_state: Tree, params: Tree) -> Tree:
    """Optimizer state made from local parameters, each tensor laid out as the parameter at the end of its path."""
    layouts = dict(tree.named_leaves(params))

    def one(path: str, leaf: Any) -> Any:
        end = tree.ending(path, layouts)
        if end is None or not isinstance(leaf, torch.Tensor) or leaf.shape != to_local(layouts[end]).shape:
            return leaf
        return like(leaf, layouts[end])

    return tree.map_named(one, opt_state)


def sum_over_tensor(grads: Tree, plans: Tree, mesh: Mesh) -> Tree:
    """Add up, over `tensor`, gradients of parameters that every tensor peer holds whole: each saw its part of the
    sequence only. One all-reduce for the whole model."""
    group = mesh.group("tensor")
    leaves, treedef = tree.flatten(grads)
    mine = [i for i, plan in enumerate(tree.leaves(plans)) if is_replicated_over_tensor(plan)]
    flat = torch.cat([leaves[i].flatten() for i in mine])
    dist.all_reduce(flat, group=group)
    for i, piece in zip(mine, flat.split([leaves[i].numel() for i in mine]), strict=True):
        leaves[i] = piece.view_as(leaves[i])
    return tree.unflatten(treedef, leaves)


def make_global_norm(mesh: Mesh, plans: Tree) -> Callable[[Tree], torch.Tensor]:
    """The norm of a whole gradient tree from this rank's parts: fp32 0-d, the same on every rank. One all-reduce."""

    def global_norm(grads: Tree) -> torch.Tensor:
        if mesh.world is None:
            return optim.global_norm(grads)
        norms = torch.stack(torch._foreach_norm(tree.leaves(grads))).float()
        # What several ranks hold alike must count once: divide by how many do before adding over all of them.
        copies = [
            mesh.shape.replicate * (mesh.shape.tensor if is_replicated_over_tensor(plan) else 1)
            for plan in tree.leaves(plans)
        ]
        total = (norms.square() / torch.tensor(copies, dtype=norms.dtype, device=norms.device)).sum()
        dist.all_reduce(total, group=mesh.world)
        return total.sqrt()

    return global_norm


def is_replicated_over_tensor(plan: Plan) -> bool:
    """Whether every tensor peer holds this parameter whole."""
    return plan.stored.dim_of("tensor") is None


def _combine(total: tuple, new: tuple, *factor: torch.Tensor) -> tuple:
    """Gradients add up; of what the ports saw the largest counts, whatever the loss is multiplied with."""
    return add(total[0], new[0], *factor), maximum(total[1], new[1])


def _tensors(total: torch.Tensor, count: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a loss returned, its count a tensor also where a loss of one's own gives a plain number."""
    return total, torch.as_tensor(count, device=total.device)


def _over_ranks(values: list[tuple], mesh: Mesh, dtype: torch.dtype = torch.float32) -> tuple:
    """(sum of losses, sum of counts) over micro-batches and ranks. fp64 on the way: counts stay whole numbers."""
    columns = zip(*values, strict=True)
    pair = torch.stack([torch.stack([value.double() for value in column]).sum() for column in columns])
    if mesh.world is not None:
        dist.all_reduce(pair, group=mesh.world)
        pair = pair / mesh.shape.tensor  # tensor peers all hold the same numbers
    return pair[0].to(dtype), pair[1].to(dtype)
