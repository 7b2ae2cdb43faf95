"""What a run saves, and what it waits for: the loop's side of ftrain.checkpoint."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ftrain import checkpoint
from ftrain.recipe import dump
from ftrain.run import Run
from ftrain.step import TrainState, stored

# For a save that goes on when its run fails. Less than what spawn.py grants a rank whose peer has died.
LAST_SECONDS = 10.0


@contextlib.contextmanager
def saver(run: Run, out: Path | None) -> Iterator[Callable[..., None]]:
    """`save(state, record, wait=False)`, which writes out/checkpoints/step-...; without `out` nothing.

    record: the step's, for the numbers that go on in the next run.
    wait: return when it is on disk. With checkpoint.async_save it otherwise goes on beside training, and is
    waited for before the next one and at the end: an error in it is raised there, on every rank. When the
    run fails, a save that goes on gets LAST_SECONDS to become whole, and the run's own error is raised. Collective.
    """
    options, pending, group = run.recipe.checkpoint, None, None
    if out is not None and options.async_save and run.world.world_size > 1:
        # A group waits for its members, and long: one that is lost already is noticed by a message to all.
        dist.all_reduce(torch.zeros(1))
        group = dist.new_group(backend="gloo")  # the save's messages must not mix with training's

    def save(state: TrainState, record: dict[str, Any], wait: bool = False) -> None:
        nonlocal pending
        if out is None:
            return
        arguments: dict[str, Any] = {"step": state.step, "meta": facts(run, state, record), "keep": options.keep}
        if not options.async_save:
            checkpoint.save(out / "checkpoints", stored(state), **arguments)
            return
        if pending is not None:
            pending.wait()
        pending = checkpoint.save_async(out / "checkpoints", stored(state), **arguments, group=group)
        if wait:
            pending.wait()

    try:
        yield save
    except Exception:
        if pending is not None:
            with contextlib.suppress(checkpoint.CheckpointError, TimeoutError):
                pending.wait(LAST_SECONDS)
        raise
    if pending is not None:
        pending.wait()


def facts(run: Run, state: TrainState, record: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's meta: what a later run goes on with, and what a reader wants to know. JSON values."""
    recipe, shape = run.recipe, run.mesh_shape
    return {
        "recipe": dump(recipe),
        "tokens": record["tokens"],
        "skipped": record.get("skipped", 0),
        "seed": recipe.train.seed,
        # A batch is a function of (seed, step): this is all that there is to a position in the data.
        "data": {"next_step": state.step, "sequences": state.step * recipe.data.global_batch_size},
        "layout": {"replicate": shape.replicate, "shard": shape.shard, "tensor": shape.tensor},
        "device": run.device.type,
    }
