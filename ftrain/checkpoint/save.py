"""Writing a checkpoint: plan, write, commit. Every rank writes its own pieces; rank 0 makes them count.

The order is what makes a save whole or absent: every file is synced before the folder gets its name, and old
checkpoints go only after that.
"""

import math
import platform
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from importlib import metadata as packages
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from ftrain import tree
from ftrain.checkpoint import agree, folder, storage

SHOWN = 8  # names that an error lists
PIECE = 1 << 18  # elements looked at in one go: they and the answers stay in the cache


class PendingSave(NamedTuple):
    """A save that goes on in the background. Call `wait` before the next save and before the process ends."""

    step: int
    future: Future

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self.future.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Block until the save has ended. Returns the checkpoint's path, or raises its CheckpointError.

        Raises TimeoutError after `timeout` seconds (None: never), while the save goes on.
        """
        return self.future.result(timeout)


def save(root: Path | str, state: Any, *, step: int, meta: dict, keep: int, group: Any = None) -> Path:
    """Write `state` to `root/step-<step>` and remove older checkpoints but the newest `keep` (0 keeps all).

    state: a tree of tensors, DTensors and numbers. meta: facts about the run, as JSON holds them; `step`,
    `versions` and `world_size` are added. group: the process group that coordinates (None: the default one).
    Collective: every rank calls it with its own part of the state. Returns the path. A state with values that
    are not finite is refused: no run could go on from it.
    Raises CheckpointError on every rank if any rank fails; nothing is then left under the checkpoint's name.
    """
    root = Path(root)
    doing = f"save step {step} in {root}"
    rank, size = agree.rank_and_size(group)
    temporary = root / (folder.folder_name(step) + ".tmp")
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    facts = {**meta, "step": step, "versions": _versions(), "world_size": size}
    plans = agree.each(doing, lambda: _plan(planner, state, step, facts, rank), group)
    try:
        plan = agree.deal(doing, lambda: _prepare(temporary, planner, plans), group)
        written = agree.each(doing, lambda: _write(temporary, planner, plan, rank), group)
        return agree.first(doing, lambda: _commit(temporary, planner, plans, written, facts, keep), group)
    except agree.CheckpointError:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def save_async(root: Path | str, state: Any, *, step: int, meta: dict, keep: int, group: Any = None) -> PendingSave:
    """`save` in the background: copies the state to host memory, starts a thread and returns.

    The state may be changed or donated as soon as this returns. With several ranks `group` must be a process
    group of its own (`dist.new_group(backend="gloo")`, once per run): the thread's messages must not mix with
    training's. A save that fails leaves at most a `.tmp` folder, and stops nothing: its error waits in
    `wait()`, on every rank.
    """
    if agree.rank_and_size()[1] > 1 and group is None:
        raise ValueError(
            "save_async needs a process group of its own when there are several ranks: "
            'make one with torch.distributed.new_group(backend="gloo") once, and pass it as group='
        )
    copy = tree.map(_host_copy, state)
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(save(root, copy, step=step, meta=meta, keep=keep, group=group))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=f"save step {step}").start()
    return PendingSave(step, future)


def _host_copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    return leaf.clone() if leaf.device.type == "cpu" else leaf.cpu()


def _plan(
    planner: DefaultSavePlanner, state: Any, step: int, facts: dict, rank: int
) -> tuple[SavePlan, dict[str, Any]]:
    """What this rank could write, and the numbers in its state. Refuses what cannot be stored, by name."""
    if type(step) is not int or step < 0:
        raise ValueError(f"step must be an integer from 0 up; got {step!r}")
    folder.encode_manifest(folder.Manifest(step, {}, 0, facts))  # meta that JSON cannot hold: say so now
    named = tree.named_leaves(state)
    for name, leaf in named:
        _check_storable(name, leaf)
    if broken := [name for name, leaf in named if _not_finite(leaf)]:
        more = f" and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        raise ValueError(f"not finite: {', '.join(broken[:SHOWN])}{more}; no run could go on from such a state")
    tensors = {name: leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}
    planner.set_up_planner(tensors, is_coordinator=rank == 0)
    return planner.create_local_plan(), {name: leaf for name, leaf in named if name not in tensors}


def _check_storable(name: str, leaf: Any) -> None:
    if type(leaf) in storage.SCALARS.values():
        return
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter, DTensor):
        raise TypeError(f"{name} is a {type(leaf).__name__}; a checkpoint holds tensors, DTensors and numbers")
    if leaf.dtype not in storage.DTYPES.values():
        raise TypeError(f"{name} has dtype {leaf.dtype}, which a checkpoint cannot hold")
    if leaf.device.type == "meta":
        raise ValueError(f"{name} is on the meta device: it has no values to save")
    if isinstance(leaf, DTensor) and any(p.is_partial() for p in leaf.placements):
        raise ValueError(f"{name} has placements {leaf.placements}: a partial sum must be reduced before it is saved")


def _not_finite(leaf: Any) -> bool:
    """Whether a leaf has an Inf or a NaN in this rank's part. One pass over memory."""
    if isinstance(leaf, float):
        return not math.isfinite(leaf)
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return False
    local = (leaf.to_local() if isinstance(leaf, DTensor) else leaf).detach()
    if not local.numel():
        return False
    if local.device.type != "cpu":
        local = local.float() if local.element_size() == 1 else local  # fp8 has no comparison
        return not torch.stack(torch.aminmax(local)).isfinite().all()  # a NaN is both the least and the greatest
    # By numpy, in this thread: hundreds of small parallel regions beside a training that uses all cores crawl.
    flat = (local if local.dtype in (torch.float32, torch.float64) else local.float()).reshape(-1).numpy()
    return not all(np.isfinite(flat[at : at + PIECE]).all() for at in range(0, len(flat), PIECE))


def _prepare(temporary: Path, planner: DefaultSavePlanner, plans: list) -> list[SavePlan]:
    """On rank 0: a fresh temporary folder, and who writes what (replicated pieces once)."""
    numbers = [numbers for _, numbers in plans]
    for rank, other in enumerate(numbers):
        differ = sorted(name for name in {*other, *numbers[0]} if other.get(name) != numbers[0].get(name))
        if differ:
            a, b = numbers[0].get(differ[0]), other.get(differ[0])
            raise ValueError(f"the ranks disagree: {differ[0]} is {a} on rank 0 and {b} on rank {rank}")
    dealt, _ = planner.create_global_plan([plan for plan, _ in plans])
    temporary.parent.mkdir(parents=True, exist_ok=True)
    folder.clear_leftovers(temporary.parent)
    temporary.mkdir()
    return dealt


def _write(temporary: Path, planner: DefaultSavePlanner, plan: SavePlan, rank: int) -> dict:
    """Write this rank's pieces. Returns (name, offsets) -> (file, start, crc32)."""
    plan = planner.finish_plan(plan)
    file = storage.data_file(rank)

    def pieces() -> Iterator[tuple[tuple[str, tuple[int, ...]], torch.Tensor]]:
        for item in plan.items:
            data, layout = planner.resolve_data(item), item.tensor_data
            assert isinstance(data, torch.Tensor) and layout is not None, f"{item.index.fqn} is no tensor"
            sizes = layout.chunk.sizes
            if data.shape != sizes:
                raise ValueError(f"{item.index.fqn} has a local part of {tuple(data.shape)}, its layout says {sizes}")
            yield (item.index.fqn, tuple(item.index.offset or ())), data

    if not plan.items:
        return {}
    places = storage.write_chunks(temporary / file, pieces())
    if rank:  # rank 0 syncs its own with all that it writes (_commit)
        storage.sync(temporary / file)
    return {key: (file, *place) for key, place in places.items()}


def _commit(temporary: Path, planner: DefaultSavePlanner, plans: list, written: list, facts: dict, keep: int) -> Path:
    """On rank 0: index, manifest, name; then retention."""
    places = {key: place for part in written for key, place in part.items()}
    leaves = {}
    for name, stored in planner.metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), f"{name} is no tensor"
        chunks = tuple(
            storage.Chunk(tuple(c.offsets), tuple(c.sizes), *places[name, tuple(c.offsets)]) for c in stored.chunks
        )
        leaves[name] = storage.Leaf(stored.properties.dtype, tuple(stored.size), chunks)
    files = {file: 0 for file, _, _ in places.values()}
    for file in files:
        if not (temporary / file).exists():
            raise OSError(f"rank 0 cannot see {temporary / file}, which another rank wrote: is {temporary} shared?")
        files[file] = (temporary / file).stat().st_size
    text = storage.encode_index(leaves, plans[0][1])
    files[storage.INDEX], crc = storage.write_text(temporary / storage.INDEX, text)
    manifest = folder.Manifest(facts["step"], files, crc, facts)
    storage.write_text(temporary / folder.MANIFEST, folder.encode_manifest(manifest))
    own = [temporary / name for name in files if name in (storage.INDEX, storage.data_file(0))]
    storage.sync(*own, temporary / folder.MANIFEST, temporary)
    final = temporary.with_suffix("")
    folder.put_in_place(temporary, final)
    storage.sync(final.parent)
    try:
        folder.prune(final.parent, keep, protect=final)
    except OSError as error:
        raise agree.CheckpointError(f"it is saved, but an older checkpoint could not be removed ({error})") from error
    return final


def _versions() -> dict[str, str]:
    try:
        ftrain = packages.version("ftrain")
    except packages.PackageNotFoundError:  # run from a source folder that was never installed
        ftrain = "unknown"
    return {"ftrain": ftrain, "torch": str(torch.__version__), "python": platform.python_version()}
