"""Training steps of a tiny model on any layout, traced: what the fp8 tests compare."""

import numpy as np
import torch.distributed as dist

from ftrain import Run, load_recipe, tree
from ftrain.collectives import all_reduce_max
from ftrain.launch import World
from ftrain.parity import gradients
from ftrain.sharding import full, to_local
from ftrain.step import apply_post

# Dims that divide by nothing: over four ranks, 9 rows are 3, 3, 3 and none.
TINY = {
    "vocab_size": 60,
    "dim": 9,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "head_dim": 6,
    "ffn_dim": 44,
}
# A micro-batch is one sequence, so that every layout scales the same activations together.
BASE = (
    *(f"model.{key}={value}" for key, value in TINY.items()),
    "data.source=synthetic",
    "precision.compute=float32",
    "data.seq_len=16",
    "data.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.compile=false",
    "train.steps=20",
    "fp8.recipe=tensorwise",
    "fp8.skip=[]",
)
LAYOUTS = {
    "one rank": (1, ()),
    "shard 2": (2, ("parallel.shard=2",)),
    "shard 4": (4, ("parallel.shard=4",)),
    "replicate 2 x shard 2": (4, ("parallel.replicate=2", "parallel.shard=2")),
    "tensor 2": (2, ("parallel.tensor=2",)),
    "tensor 4": (4, ("parallel.tensor=4",)),
    "shard 2 x tensor 2": (4, ("parallel.shard=2", "parallel.tensor=2")),
}
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")


def make_run(rank, world, overrides):
    """A Run of the tiny recipe on the CPU."""
    return Run(load_recipe("debug", (*BASE, *overrides)), World(rank, world), "cpu")


def start(run, edit=None, *args):
    """Its first state, after `edit(path, whole values)` has changed the parameters in place."""
    state = run.init()
    if edit is None:
        return state
    whole = full(state.params)
    tree.map_named(lambda path, value: edit(path, value, *args), whole)
    tree.map(lambda leaf, value: _set(leaf, value), state.params, whole)
    return apply_post(state._replace(fp8_state=None), run.post)


def _set(leaf, value):
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(leaf, DTensor):
        value = distribute_tensor(value, leaf.device_mesh, leaf.placements).to_local()
    to_local(leaf).copy_(value)


def trace(rank, world, overrides, steps=2, edit=None):
    """For every step the loss, the norm and each whole gradient, as numpy; then the step is taken."""
    run = make_run(rank, world, overrides)
    state, seen = start(run, edit), []
    for i in range(steps):
        grads, metrics = gradients(run, state, run.batch(i))
        whole = {path: leaf.numpy() for path, leaf in tree.named_leaves(full(grads))}
        seen.append((metrics["loss"].item(), metrics["grad_norm"].item(), whole))
        state, _ = run.step(state, run.batch(i))
    return seen


def losses(rank, world, overrides, steps, edit=None):
    """(loss, grad norm) of every step."""
    run = make_run(rank, world, overrides)
    state, seen = start(run, edit), []
    for i in range(steps):
        state, metrics = run.step(state, run.batch(i))
        seen.append((metrics["loss"].item(), metrics["grad_norm"].item()))
    return seen


def on(ranks, layout, fn, *overrides, **options):
    """What `fn(rank, world, overrides, ...)` returns on every rank of a layout."""
    world, parallel = LAYOUTS[layout]
    args = (world, (*parallel, *overrides), *options.values())
    return [fn(0, *args)] if world == 1 else ranks(world, fn, *args)


class CountedMax:
    """all_reduce_max over the world, counting its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return all_reduce_max(x, dist.group.WORLD)


def same(a, b):
    """Whether two traces are the same bits."""
    return all(
        x[:2] == y[:2] and all(np.array_equal(x[2][path], y[2][path]) for path in x[2])
        for x, y in zip(a, b, strict=True)
    )


def difference(a, b):
    """The largest relative difference between two traces: of losses, norms, and each gradient by its norm."""
    largest = 0.0
    for x, y in zip(a, b, strict=True):
        assert y[0] > 0 and all(np.abs(grad).max() > 0 for grad in y[2].values()), "the test proves nothing"
        pairs = [(x[0], y[0]), (x[1], y[1]), *((x[2][path], y[2][path]) for path in y[2])]
        largest = max(largest, *(np.linalg.norm(p - q) / np.linalg.norm(q) for p, q in pairs))
    return float(largest)
