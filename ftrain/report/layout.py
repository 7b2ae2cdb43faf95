"""Where every parameter lies: what its rules say, how it is split, which part of it a rank holds and sends.

All of it is arithmetic on the plan of the run. Pieces of a split are of equal height but for the last ones, so the
largest is that of the first rank and the smallest that of the last, however many ranks there are.
"""

from dataclasses import dataclass
from math import prod

from ftrain import tree
from ftrain.fp8.use import padded
from ftrain.fsdp import Wire
from ftrain.param import Param
from ftrain.report.rehearsal import PerElement
from ftrain.run import Run
from ftrain.sharding import MeshShape, Plan, Spec, local_shape


@dataclass(frozen=True)
class Row:
    """One parameter. Shapes are of its stored parts, bytes those of one rank (`Row.local`).

    split: "replicated", "even", "uneven" or "EMPTY" (some ranks hold nothing). pieces: in how many it is cut; holders:
    how many of them have anything in them. wire_bytes: what a rank sends in one gather over `shard`; padding_bytes: the
    filler in all that a gather brings, which makes every rank's piece alike. not_fp8: why it is not multiplied in fp8;
    None where it is. fp8_shape: its shape inside fp8 products on CUDA, where that is padded.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    rules: tuple[str, ...]
    stored: Spec
    used: Spec
    split: str
    largest: tuple[int, ...]
    smallest: tuple[int, ...]
    local: tuple[int, ...]
    pieces: int
    holders: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    wire_dtype: str
    wire_bytes: int
    padding_bytes: int
    not_fp8: str | None
    fp8_shape: tuple[int, ...] | None

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)


def layout(run: Run, per_element: dict[str, PerElement], rank: int = 0) -> list[Row]:
    """A row for every parameter, in the order of the tree. per_element: of a rehearsal of the run."""
    paths = tree.names(run.abstract)
    named = tree.unflatten(tree.flatten(run.abstract)[1], paths)
    wires = run.execution.gather(run.abstract, run.plans, named).wires
    columns = (paths, tree.leaves(run.abstract), tree.leaves(run.plans), wires)
    return [_row(run, *parts, per_element[parts[0]], rank) for parts in zip(*columns, strict=True)]


def _row(run: Run, path: str, param: Param, plan: Plan, wire: Wire, sizes: PerElement, rank: int) -> Row:
    mesh, fp8 = run.mesh_shape, run.execution.fp8
    largest, smallest, local = (local_shape(param.shape, plan.stored, mesh, r) for r in (0, mesh.size - 1, rank))
    pieces, holders = split_of(param.shape, plan.stored, mesh)
    mine = prod(local)
    why = fp8.why_not(path)
    inside = padded(wire.shape) if why is None else wire.shape
    return Row(
        path=path,
        dtype=str(param.dtype).removeprefix("torch."),
        shape=param.shape,
        rules=tuple(str(rule) for rule in plan.rules if getattr(mesh, rule.axis) > 1),
        stored=shown(plan.stored, mesh),
        used=shown(plan.compute, mesh),
        split=_split(pieces, holders, largest, smallest),
        largest=largest,
        smallest=smallest,
        local=local,
        pieces=pieces,
        holders=holders,
        parameter_bytes=mine * param.dtype.itemsize,
        gradient_bytes=mine * sizes.gradient,
        optimizer_bytes=mine * sizes.optimizer,
        wire_dtype=str(wire.dtype).removeprefix("torch."),
        wire_bytes=0 if mesh.shard == 1 else wire.numel() * wire.dtype.itemsize,
        padding_bytes=(wire.numel() * mesh.shard - prod(wire.shape)) * wire.dtype.itemsize,
        not_fp8=why,
        fp8_shape=None if inside == wire.shape else inside,
    )


def split_of(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> tuple[int, int]:
    """(in how many pieces a tensor is cut, how many of them have anything in them)."""
    pieces = holders = 1
    for size, axes in zip(shape, spec.dims, strict=True):
        for axis in axes:
            parts = getattr(mesh, axis)
            height = -(-size // parts)
            pieces, holders = pieces * parts, holders * (-(-size // height) if height else 0)
            size = height
    return pieces, holders


def shown(spec: Spec, mesh: MeshShape) -> Spec:
    """The spec without the axes of one rank, which split nothing."""
    return Spec(tuple(tuple(axis for axis in axes if getattr(mesh, axis) > 1) for axes in spec.dims))


def _split(pieces: int, holders: int, largest: tuple[int, ...], smallest: tuple[int, ...]) -> str:
    if pieces == 1:
        return "replicated"
    if holders < pieces:
        return "EMPTY"
    return "even" if largest == smallest else "uneven"
