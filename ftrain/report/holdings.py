"""How much each rank holds: with FSDP the first ranks hold the most, and where rows do not divide the last hold less.

Thousands of ranks are a handful of groups. A rank's pieces never grow with its place on `shard`, the innermost split,
so ranks that hold equally many bytes hold pieces of equal sizes and are neighbours on that axis. Splits over `tensor`
are even, and replicas are alike.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from math import prod

from ftrain import tree
from ftrain.report.rehearsal import PerElement
from ftrain.run import Run
from ftrain.sharding import local_shape


@dataclass(frozen=True)
class Holding:
    """What each of some ranks holds, in bytes: those whose place on `shard` is from `first` to `last`."""

    first: int
    last: int
    ranks: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total(self) -> int:
        """Bytes of the three together."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def holdings(run: Run, per_element: dict[str, PerElement]) -> list[Holding]:
    """All ranks, in groups that hold the same, in the order of `shard`. per_element: of a rehearsal of the run."""
    mesh = run.mesh_shape
    columns = (tree.names(run.abstract), tree.leaves(run.abstract), tree.leaves(run.plans))
    alike = Counter(
        (param.shape, plan.stored, param.dtype.itemsize, per_element[path])
        for path, param, plan in zip(*columns, strict=True)
    )

    def at(place: int) -> tuple[int, int, int]:
        total = (0, 0, 0)
        for (shape, spec, itemsize, sizes), count in alike.items():
            numel = count * prod(local_shape(shape, spec, mesh, place * mesh.tensor))
            each = (itemsize, sizes.gradient, sizes.optimizer)
            total = tuple(sum_ + numel * nbytes for sum_, nbytes in zip(total, each, strict=True))
        return total

    groups, first = [], 0
    while first < mesh.shard:
        held = at(first)
        end = bisect_right(range(mesh.shard), -sum(held), lo=first, key=lambda place: -sum(at(place)))
        groups.append(Holding(first, end - 1, (end - first) * mesh.tensor * mesh.replicate, *held))
        first = end
    return groups
