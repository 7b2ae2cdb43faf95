"""The memory that inspect-sharding tells is the memory that a step takes."""

import gc
from collections import Counter

import pytest
import steps
import torch
from torch.profiler import ProfilerActivity, profile

from ftrain import tree
from ftrain.parity import gradients
from ftrain.report import depth, inspect
from ftrain.report.inspection import checked
from ftrain.report.ledger import Ledger
from ftrain.report.rehearsal import GATHERED, _kind, rehearse
from ftrain.sharding import to_local

# Narrow and long: megabytes of activations beside which the copies that gloo makes of weights do not matter.
BASE = (
    *("model.dim=64", "model.n_layers=3", "model.n_heads=4", "model.n_kv_heads=2", "model.head_dim=16"),
    *("model.ffn_dim=192", "data.source=synthetic", "data.seq_len=256", "data.global_batch_size=8"),
    *("train.micro_batch_size=2", "train.compile=false", "precision.compute=float32"),
)


def peak_of_a_step(rank, world, overrides):
    """Bytes that torch's CPU allocator has out at most during a step, of which the state's."""
    run = steps.Run(steps.load_recipe("debug", (*BASE, *overrides)), steps.World(rank, world), "cpu")
    state, batch = run.init(), run.batch(0)
    for _ in range(2):
        state, _ = run.step(state, batch)
    gc.collect()
    leaves = [to_local(leaf) for leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)] + list(batch.values())
    held = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in leaves}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        state, _ = run.step(state, batch)
    return sum(held.values()) + most_allocated(profiler)


def most_allocated(profiler):
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.remat=full", "train.loss_chunks=3"),
        ("train.remat=0.4", "precision.compute=bfloat16", "train.micro_batch_size=8"),
        ("data.global_batch_size=2", "model.tie_embeddings=true"),
    ],
    ids=["plain", "full remat", "some remat in bf16", "tied, one micro-batch"],
)
def test_one_rank_takes_what_was_told(overrides):
    took = peak_of_a_step(0, 1, overrides)
    assert abs(inspect("debug", (*BASE, *overrides), world_size=1).memory.peak / took - 1) < 0.02


@pytest.mark.slow
def test_a_compiled_step_takes_what_was_told():
    overrides = ("precision.compute=bfloat16", "train.compile=true")
    took = peak_of_a_step(0, 1, overrides)
    assert abs(inspect("debug", (*BASE, *overrides), world_size=1).memory.peak / took - 1) < 0.1


@pytest.mark.parametrize(
    "world, overrides",
    [
        (2, ()),
        (2, ("parallel.reshard_after_forward=false",)),
        (4, ("parallel.replicate=2", "train.remat=0.4")),
    ],
    ids=["shard 2", "shard 2, weights kept", "replicate 2 x shard 2"],
)
def test_each_of_several_ranks_takes_what_was_told(ranks, world, overrides):
    """Within 10%: gloo makes copies of its own of what it sends, and when they go is up to its threads."""
    overrides = (*overrides, "data.global_batch_size=16", "train.micro_batch_size=4")
    took = ranks(world, peak_of_a_step, world, overrides)
    told = inspect("debug", (*BASE, *overrides), world_size=world).memory.peak
    assert abs(told / min(took) - 1) < 0.1, (told, took)


def peak_of_tensors(rank, world, overrides):
    """Bytes of tensors that are alive at most during a step, beside the state's and the batch's: the least of three."""
    run = steps.Run(steps.load_recipe("debug", (*BASE, *overrides)), steps.World(rank, world), "cpu")
    state, batch = run.init(), run.batch(0)
    return min(most_alive(run, state, batch) for _ in range(3))


def most_alive(run, state, batch, kind=None):
    with Ledger() as ledger:
        run.step(state, batch)
    alive = most = 0
    for change in ledger.changes:
        if kind is None or _kind(ledger.makers[change.storage]) == kind:
            alive += change.nbytes
            most = max(most, alive)
    return most


@pytest.mark.parametrize("overrides", [("train.remat=full",), ("fp8.recipe=tensorwise", "fp8.skip=[]")], ids=str)
def test_tensors_of_a_tensor_parallel_step_are_those_told(ranks, overrides):
    """Tensors alone: what gloo copies of activations is as much again."""
    overrides = (*overrides, "parallel.tensor=2", "data.seq_len=64")
    took = ranks(4, peak_of_tensors, 4, overrides)
    recipe, run = checked("debug", (*BASE, *overrides), 4)
    rehearsal = rehearse(recipe, run.mesh_shape)
    told = rehearsal.peak.total() - rehearsal.start.total() - run.micro_batches * 2 * 2 * 64 * 8
    assert abs(told / min(took) - 1) < 0.02, (told, took)


def gradients_and_gathers(rank, world, overrides):
    """Bytes of all gradients of this rank, and the most of gathered weights that is alive in a step.

    Of several steps the least: gloo's threads may hold on to a buffer for a moment longer than the step does.
    """
    run = steps.make_run(rank, world, overrides)
    state, batch = steps.start(run), run.batch(0)
    grads, _ = gradients(run, state, batch)
    most = min(most_alive(run, state, batch, GATHERED) for _ in range(8))
    return sum(to_local(grad).nbytes for grad in tree.leaves(grads)), most


@pytest.mark.parametrize(
    "layout, overrides",
    [
        ("one rank", ()),
        ("shard 4", ("fp8.recipe=none",)),
        ("shard 2 x tensor 2", ("parallel.reshard_after_forward=false",)),
    ],
    ids=str,
)
def test_what_is_exact_is_exact(ranks, layout, overrides):
    world, parallel = steps.LAYOUTS[layout]
    found = steps.on(ranks, layout, gradients_and_gathers, *overrides)
    told = inspect("debug", (*steps.BASE, *parallel, *overrides), world_size=world).memory
    parts = {part.what: part for part in told.parts}
    told = parts["gradients"].most, parts["gathered weights"].most
    assert all(part.exact for part in (parts["gradients"], parts["gathered weights"]))
    assert found[0] == told


def test_between_forward_and_backward_only_kept_weights_are_alive():
    for keep, alive in (("true", False), ("false", True)):
        recipe, run = checked("debug", (*BASE, f"parallel.reshard_after_forward={keep}"), 2)
        assert (rehearse(recipe, run.mesh_shape).saved[GATHERED] > 1000) is alive


@pytest.mark.parametrize(
    "world, overrides",
    [
        (1, ("train.remat=full", "data.global_batch_size=8")),
        (4, ("parallel.replicate=2", "train.remat=0.5", "train.compile=true")),
        (4, ("parallel.tensor=2", "fp8.recipe=tensorwise", "train.remat=0.3")),
        (2, ("parallel.reshard_after_forward=false", "fp8.recipe=delayed")),
    ],
    ids=str,
)
def test_deep_models_are_told_from_shallow_ones(world, overrides):
    """Calls to the byte; memory to a thousandth, since norms' gradients need not add up with the rest."""
    recipe, run = checked("debug", (*BASE, "model.n_layers=7", *overrides), world)
    deep, whole = depth.rehearse_deep(recipe, run), rehearse(recipe, run.mesh_shape)
    assert deep.counts == whole.counts and deep.sent == whole.sent and deep.per_element == whole.per_element
    for part in ("start", "saved", "done", "forward", "backward"):
        a, b = (Counter.total(getattr(rehearsal, part)) for rehearsal in (deep, whole))
        assert abs(a / b - 1) < (0.02 if part == "saved" else 0.001), part


def test_layers_that_fp8_skips_communicate_as_they_do():
    overrides = (
        *BASE,
        "model.n_layers=6",
        "fp8.recipe=tensorwise",
        'fp8.skip=["layers.0.*", "layers.5.w_down", "output"]',
    )
    recipe, run = checked("debug", (*overrides, "parallel.tensor=2"), 4)
    assert len(depth.makes_of(run)) == 3
    deep, whole = depth.rehearse_deep(recipe, run), rehearse(recipe, run.mesh_shape)
    assert deep.counts == whole.counts and deep.sent == whole.sent
