"""Reading a checkpoint into a state of any layout: by name, all or nothing, and never in silence.

torch.distributed.checkpoint works out which stored chunks overlap which local shards; this file checks first
that the checkpoint and the state agree on every name, shape and dtype, and says all differences at once.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from ftrain import tree
from ftrain.checkpoint import agree, folder, storage

SHOWN = 4  # names of one kind that an error lists


def load(path: Path | str, like: Any, *, ignore: tuple[str, ...] = (), group: Any = None) -> tuple[Any, dict[str, Any]]:
    """The state stored at `path`, in the structure, sharding and devices of `like`, and its meta.

    like: a tree as `save` takes, of real tensors or of meta ones (a meta DTensor gets memory on its mesh's
    device, a plain meta tensor on the CPU). It is not modified.
    ignore: top-level names that the checkpoint may have and `like` has not ("opt_state" when only the
    parameters are wanted).
    Collective: every rank calls it. Raises CheckpointError on every rank for a checkpoint that is incomplete
    or damaged, or whose names, shapes or dtypes are not those of `like`.
    """
    result = []
    agree.each(f"load {path}", lambda: result.append(_load(Path(path), like, ignore)), group)
    return result[0]


def schema(path: Path | str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every leaf stored at `path`; a number has its type's name and shape ()."""
    leaves, scalars = _read_index(Path(path), folder.read_manifest(Path(path)))
    return {**_described(leaves), **_described(scalars)}


def _load(path: Path, like: Any, ignore: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    reason = folder.fault(path)
    if reason:
        raise agree.CheckpointError(reason)
    manifest = folder.read_manifest(path)
    leaves, scalars = _read_index(path, manifest)
    wanted = dict(tree.named_leaves(like))
    problems = _differences(_described(leaves) | _described(scalars), _described(wanted), ignore)
    if problems:
        raise agree.CheckpointError("it does not fit the state asked for:\n  " + "\n  ".join(problems))
    tensors = {name: _room_for(leaf) for name, leaf in wanted.items() if isinstance(leaf, torch.Tensor)}
    _fill(path, tensors, leaves)
    values = {**scalars, **tensors}
    return tree.map_named(lambda name, _: values[name], like), manifest.meta


def _read_index(path: Path, manifest: folder.Manifest) -> tuple[dict, dict]:
    text = folder.read_index_text(path, manifest)
    try:
        return storage.decode_index(text, manifest.files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise agree.CheckpointError(f"its {storage.INDEX} is damaged ({error})") from error


def _described(leaves: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    def describe(leaf: Any) -> tuple[str, tuple[int, ...]]:
        if isinstance(leaf, (torch.Tensor, storage.Leaf)):
            return str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)
        return type(leaf).__name__, ()

    return {name: describe(leaf) for name, leaf in leaves.items()}


def _differences(stored: dict, wanted: dict, ignore: tuple[str, ...]) -> list[str]:
    """A sentence for each kind of difference, with its count and the first few names."""
    missing = [name for name in wanted if name not in stored]
    surplus = [name for name in stored if name not in wanted and name.split(".")[0] not in ignore]
    both = [name for name in wanted if name in stored]
    kinds = {
        "missing from the checkpoint": missing,
        "in the checkpoint only": surplus,
        "of another shape": [
            f"{name} (checkpoint {stored[name][1]}, asked for {wanted[name][1]})"
            for name in both
            if stored[name][1] != wanted[name][1]
        ],
        "of another dtype": [
            f"{name} (checkpoint {stored[name][0]}, asked for {wanted[name][0]})"
            for name in both
            if stored[name][0] != wanted[name][0]
        ],
    }
    return [
        f"{len(names)} {kind}: {', '.join(names[:SHOWN])}" + (", ..." if len(names) > SHOWN else "")
        for kind, names in kinds.items()
        if names
    ]


def _room_for(leaf: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor of the layout of `leaf`."""
    if not isinstance(leaf, DTensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu" if leaf.is_meta else leaf.device)
    local = leaf.to_local().detach()
    room = torch.empty(
        local.shape, dtype=local.dtype, device=leaf.device_mesh.device_type if local.is_meta else local.device
    )
    return DTensor.from_local(
        room, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
    )


def _fill(path: Path, tensors: dict[str, torch.Tensor], leaves: dict[str, storage.Leaf]) -> None:
    """Read every chunk that overlaps this rank's part of `tensors`, once each, and copy the overlap."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, _as_dcp_metadata({name: leaves[name] for name in tensors}))
    plan = planner.finish_plan(planner.create_local_plan())
    wanted: dict[tuple[str, tuple[int, ...]], list] = {}
    for item in plan.items:
        wanted.setdefault((item.storage_index.fqn, tuple(item.storage_index.offset or ())), []).append(item)
    places = {(name, chunk.offsets): chunk for name in tensors for chunk in leaves[name].chunks}
    filled = dict.fromkeys(tensors, 0)
    for (name, offsets), items in wanted.items():
        chunk = storage.read_chunk(path, name, leaves[name].dtype, places[name, offsets])
        for item in items:
            piece = chunk
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(dim, start, length)
            planner.resolve_tensor(item).copy_(piece)
            filled[name] += math.prod(item.lengths)
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert filled[name] == local.numel(), f"{name}: {filled[name]} of {local.numel()} elements were read"


def _as_dcp_metadata(leaves: dict[str, storage.Leaf]) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=leaf.dtype),
                torch.Size(leaf.shape),
                [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in leaf.chunks],
            )
            for name, leaf in leaves.items()
        }
    )
