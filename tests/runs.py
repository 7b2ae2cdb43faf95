"""Runs of the tiny recipe on several ranks, and what they leave: for the tests of checkpoints and faults."""

import shutil

import torch

from ftrain import checkpoint, load_recipe, tree
from ftrain.launch import World
from ftrain.metrics import read_lines
from ftrain.trainer import train

LAYOUTS = {
    "one rank": (1, ()),
    "shard 2": (2, ("parallel.shard=2",)),
    "tensor 2": (2, ("parallel.tensor=2",)),
    "shard 4": (4, ("parallel.shard=4",)),
    "shard 2 x tensor 2": (4, ("parallel.shard=2", "parallel.tensor=2")),
}


def on(ranks, layout, fn, *args):
    """What `fn(rank, world, parallel, *args)` returns on every rank of a layout."""
    world, parallel = LAYOUTS[layout]
    return [fn(0, 1, parallel, *args)] if world == 1 else ranks(world, fn, world, parallel, *args)


def run_train(rank, world, parallel, path, out, *overrides):
    """Train on this rank. Returns what was said."""
    train(load_recipe(path, (*parallel, *overrides)), out=out, quiet=True, world=World(rank, world))


def contents(path) -> dict:
    """Every leaf of a checkpoint by its name: whole tensors as bytes, and numbers."""
    nested = {}
    for name, (kind, shape) in checkpoint.schema(path).items():
        *way, last = name.split(".")
        here = nested
        for key in way:
            here = here.setdefault(key, {})
        is_number = kind in checkpoint.storage.SCALARS
        here[last] = (
            checkpoint.storage.SCALARS[kind](0) if is_number else torch.empty(shape, dtype=getattr(torch, kind))
        )
    state, _ = checkpoint.load(path, nested)
    return {name: as_bytes(leaf) for name, leaf in tree.named_leaves(state)}


def as_bytes(leaf):
    return leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if torch.is_tensor(leaf) else leaf


def without_times(record: dict) -> dict:
    """A step's record, or a run's summary, without what no two runs have alike."""
    return {k: v for k, v in record.items() if k not in ("seconds", "tokens_per_second", "memory_bytes")}


def records(out) -> list[dict]:
    """The records of a run's folder, without times."""
    return [without_times(line) for line in read_lines(out / "metrics.jsonl")]


def copy_start(source, target, step=3):
    """A run's folder as it was after `step`: its records, and that checkpoint alone."""
    name = f"step-{step:08d}"
    shutil.copytree(source / "checkpoints" / name, target / "checkpoints" / name)
    shutil.copy(source / "metrics.jsonl", target / "metrics.jsonl")
    return target
