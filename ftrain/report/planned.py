"""A mesh of ranks that do not exist, so that one process can go through the motions of any of them.

`PlannedMesh` stands where a sharding.Mesh stands. Its groups have a rank and a size and no peers. Its device is "meta",
where tensors have shapes and no values: a collective over such a group is worked out, never carried out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from ftrain.sharding import Mesh, MeshShape

WORLD = "world"  # the axis of a collective over all ranks


class Peers(dist.ProcessGroup):
    """The ranks along one axis, as number `rank` of `size` sees them. Nothing can be sent to them."""

    def __init__(self, axis: str, rank: int, size: int):
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks the constructor without a store
        self.axis = axis

    @property
    def group_name(self) -> GroupName:
        return GroupName(f"ftrain planned {self.axis}")

    def getBackendName(self) -> str:  # torch asks for it by this name
        return "planned"


@dataclass(frozen=True)
class PlannedMesh:
    """What sharding.Mesh is, for the rank `rank` of a world that need not exist."""

    shape: MeshShape = MeshShape()
    rank: int = 0
    device: torch.device = torch.device("meta")
    device_mesh: None = None  # local tensors stay plain ones

    @cached_property
    def coordinate(self) -> dict[str, int]:
        """This rank's position on each axis."""
        return self.shape.coordinate(self.rank)

    @cached_property
    def _groups(self) -> dict[str, Peers]:
        groups = {axis: Peers(axis, self.coordinate[axis], getattr(self.shape, axis)) for axis in self.shape.axes}
        return groups | ({WORLD: Peers(WORLD, self.rank, self.shape.size)} if groups else {})

    def group(self, axis: str) -> Peers | None:
        """The ranks along `axis` through this one, or None when this rank is alone on it."""
        return self._groups.get(axis)

    @property
    def world(self) -> Peers | None:
        """All ranks, or None when there is one."""
        return self._groups.get(WORLD)

    def as_mesh(self) -> Mesh:
        """This, to whoever asks for a Mesh: it has all that one is asked for."""
        return cast(Mesh, self)

    @contextmanager
    def known(self) -> Iterator[None]:
        """torch finds a group by its name in a table of the process: be in it for the span of a rehearsal."""
        for group in self._groups.values():
            c10d._register_process_group(group.group_name, group)
        try:
            yield
        finally:
            for group in self._groups.values():
                c10d._unregister_process_group(group.group_name)


def axis_of(argument: object) -> str | None:
    """The axis of a planned group among the arguments of a collective, or None if the argument is no such group."""
    if isinstance(argument, str):
        return argument.removeprefix("ftrain planned ") if argument.startswith("ftrain planned ") else None
    if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup":  # type: ignore[attr-defined]  # torch's stub lacks it
        argument = dist.ProcessGroup.unbox(argument)
    return getattr(argument, "axis", None) if isinstance(argument, dist.ProcessGroup) else None
