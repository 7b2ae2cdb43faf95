"""Sharding as data: which mesh axes split which dim of which parameter, decided without a device.

A mesh has three axes, `replicate` x `tensor` x `shard`. A `Spec` names, per tensor dim, the axes that dim is split
over. Rules turn a parameter's logical axis names into two specs: how it is *used* in compute (split over `tensor`
only) and how it is *stored* (split over `shard` as well). ZeRO-3 is the difference between the two.

The dims of the mesh are ordered (replicate, tensor, shard), so two splits of one dim compose left to right: `tensor`
first, `shard` within. Ranks are numbered so that tensor peers are neighbours all the same: that is `MeshShape.ranks`.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ftrain import tree
from ftrain.errors import FtrainError
from ftrain.param import Param, initial_rows

AXES = ("replicate", "tensor", "shard")


class ShardingError(FtrainError, ValueError):
    """A layout that cannot work; the message names the path, the shape, the spec and both numbers."""


# --- the mesh -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeshShape:
    """How many ranks each axis has."""

    replicate: int = 1
    tensor: int = 1
    shard: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ShardingError(f"parallel.{axis}={getattr(self, axis)} must be at least 1")

    @property
    def size(self) -> int:
        """The world size."""
        return self.replicate * self.tensor * self.shard

    @property
    def data(self) -> int:
        """How many ranks see different sequences: every rank but its tensor peers."""
        return self.replicate * self.shard

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split anything, in mesh order."""
        return tuple(axis for axis in AXES if getattr(self, axis) > 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The position of `rank` on each axis. Tensor peers are neighbours: tensor varies fastest."""
        rest, tensor = divmod(rank, self.tensor)
        replicate, shard = divmod(rest, self.shard)
        return {"replicate": replicate, "tensor": tensor, "shard": shard}

    def ranks(self) -> torch.Tensor:
        """int64 (replicate, tensor, shard): which rank sits at each position of the mesh."""
        by_speed = torch.arange(self.size).view(self.replicate, self.shard, self.tensor)
        return by_speed.permute(0, 2, 1).contiguous()

    def data_index(self, rank: int) -> int:
        """Which of the `data` slices of a batch `rank` reads."""
        at = self.coordinate(rank)
        return at["replicate"] * self.shard + at["shard"]


@dataclass(frozen=True)
class Mesh:
    """A mesh shape, this process's place in it, and the process groups (None where an axis has one rank)."""

    shape: MeshShape = MeshShape()
    rank: int = 0
    device: torch.device = torch.device("cpu")
    device_mesh: DeviceMesh | None = field(default=None, compare=False)

    @cached_property
    def coordinate(self) -> dict[str, int]:
        """This rank's position on each axis."""
        return self.shape.coordinate(self.rank)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks along `axis` through this one, or None when this rank is alone on it."""
        if axis not in self.shape.axes:
            return None
        assert self.device_mesh is not None, f"a mesh of {self.shape} without its groups: make it with make_mesh"
        return self.device_mesh.get_group(axis)

    @property
    def world(self) -> dist.ProcessGroup | None:
        """All ranks, or None when there is one."""
        return dist.group.WORLD if self.shape.size > 1 else None


def make_mesh(shape: MeshShape, device: torch.device | str = "cpu", timeout: float | None = None) -> Mesh:
    """The live mesh of `shape`. One rank needs no process group; more need `torch.distributed` initialised.

    timeout: seconds for a collective along one axis; None: torch's default for groups, whatever the world's is.
    Raises ShardingError when the process group has another size than the mesh.
    """
    device = torch.device(device)
    if shape.size == 1:
        return Mesh(shape, 0, device)
    if not dist.is_initialized() or dist.get_world_size() != shape.size:
        world = dist.get_world_size() if dist.is_initialized() else 1
        product = f"replicate {shape.replicate} x shard {shape.shard} x tensor {shape.tensor}"
        raise ShardingError(f"{product} = {shape.size} ranks, but the world has {world}")
    sizes = [getattr(shape, axis) for axis in shape.axes]
    device_mesh = DeviceMesh(device.type, shape.ranks().reshape(sizes), mesh_dim_names=shape.axes)
    for group in (device_mesh.get_group(axis) for axis in shape.axes):
        if timeout is not None and group is not dist.group.WORLD:  # that one has its own
            group.set_timeout(timedelta(seconds=timeout))
    return Mesh(shape, dist.get_rank(), device, device_mesh)


# --- specs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """Per tensor dim, the mesh axes it is split over, outermost first. `Spec((("tensor", "shard"), ()))`."""

    dims: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return "(" + ", ".join("+".join(axes) or "-" for axes in self.dims) + ")"

    def dim_of(self, axis: str) -> int | None:
        """The tensor dim that `axis` splits, or None when it replicates."""
        return next((dim for dim, axes in enumerate(self.dims) if axis in axes), None)


def placements(spec: Spec, shape: MeshShape) -> list[Placement]:
    """`spec` as DTensor placements, one per mesh axis of more than one rank."""
    dims = [spec.dim_of(axis) for axis in shape.axes]
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def from_placements(items: Iterable[Placement], shape: MeshShape, ndim: int) -> Spec:
    """The inverse of `placements`. Raises ShardingError for a placement that a Spec cannot say (a partial sum)."""
    dims: list[tuple[str, ...]] = [()] * ndim
    for axis, item in zip(shape.axes, items, strict=True):
        if isinstance(item, Shard):
            dims[item.dim] = (*dims[item.dim], axis)
        elif not isinstance(item, Replicate):
            raise ShardingError(f"the placement {item} over {axis!r} is neither a split nor a replica")
    return Spec(tuple(dims))


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, stop) of piece `index` where `size` rows are cut in `parts` of equal height, the last short or empty."""
    height = -(-size // parts)
    return min(index * height, size), min((index + 1) * height, size)


def local_slices(shape: tuple[int, ...], spec: Spec, mesh: MeshShape, rank: int) -> tuple[slice, ...]:
    """Which part of a global tensor of `shape` this rank holds, one slice per dim. Needs no device."""
    at = mesh.coordinate(rank)
    slices = []
    for size, axes in zip(shape, spec.dims, strict=True):
        start, stop = 0, size
        for axis in axes:
            a, b = chunk(stop - start, getattr(mesh, axis), at[axis])
            start, stop = start + a, start + b
        slices.append(slice(start, stop))
    return tuple(slices)


def local_shape(shape: tuple[int, ...], spec: Spec, mesh: MeshShape, rank: int) -> tuple[int, ...]:
    """The shape of this rank's part of a global tensor of `shape`."""
    return tuple(s.stop - s.start for s in local_slices(shape, spec, mesh, rank))


# --- rules ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Split `dim` (a logical axis name, or a dim number) of the parameters whose path matches `path` over `axis`."""

    dim: str | int
    axis: str
    path: str = "*"

    def __str__(self) -> str:
        return f"{self.dim} -> {self.axis}" + ("" if self.path == "*" else f" for {self.path}")

    def dim_in(self, path: str, param: Param) -> int | None:
        """The tensor dim of `param` that this rule splits, or None when it does not match."""
        if not fnmatchcase(path, self.path):
            return None
        if isinstance(self.dim, int):
            return self.dim if self.dim < len(param.shape) else None
        return param.axes.index(self.dim) if self.dim in param.axes else None


@dataclass(frozen=True)
class Plan:
    """How one parameter is laid out: the spec it is used under, the spec it is stored under, the rules that said so."""

    compute: Spec
    stored: Spec
    rules: tuple[Rule, ...]


COMPUTE_RULES = (
    Rule("vocab", "tensor"),
    Rule("heads", "tensor"),
    Rule("kv_heads", "tensor"),
    Rule("mlp", "tensor"),
)
STORED_RULES = (Rule(0, "shard"),)  # on top of the compute rules


def plan(
    abstract: Any,
    mesh: MeshShape,
    compute: tuple[Rule, ...] = COMPUTE_RULES,
    stored: tuple[Rule, ...] = STORED_RULES,
) -> Any:
    """A tree of `Plan` for a tree of `Param`.

    Raises ShardingError, with every problem in one message, for a rule that names an unknown mesh axis, matches no
    parameter or only repeats an earlier rule, for an axis used twice on one parameter, and for a dim that `tensor`
    does not divide.
    """
    problems = _rule_problems(abstract, (*compute, *stored))

    def one(path: str, param: Param) -> Plan:
        dims: list[tuple[str, ...]] = [()] * len(param.shape)
        matched: list[Rule] = []
        used: dict[str, Rule] = {}
        specs = []
        for rules in (compute, stored):
            for rule in rules:
                dim = rule.dim_in(path, param)
                if dim is None:
                    continue
                if rule.axis in used:
                    problems.append(f"{path}: the rules {used[rule.axis]} and {rule} both use the axis {rule.axis!r}")
                    continue
                used[rule.axis] = rule
                matched.append(rule)
                dims[dim] = (*dims[dim], rule.axis)
            specs.append(Spec(tuple(dims)))
        for dim, axes in enumerate(specs[0].dims):
            for axis in axes:
                if axis not in AXES:
                    continue  # named by _rule_problems
                size, parts = param.shape[dim], getattr(mesh, axis)
                if size % parts:
                    problems.append(
                        f"{path}: dim {dim} ({param.axes[dim]!r}) of shape {param.shape} is split over {axis!r} by the"
                        f" spec {specs[0]}, but {size} is not a multiple of parallel.{axis}={parts}"
                    )
        return Plan(specs[0], specs[1], tuple(matched))

    plans = tree.map_named(one, abstract)
    if problems:
        raise ShardingError("\n".join(dict.fromkeys(problems)))
    return plans


def _rule_problems(abstract: Any, rules: tuple[Rule, ...]) -> list[str]:
    named = tree.named_leaves(abstract)
    problems: list[str] = []
    covered: set[tuple] = set()
    for rule in rules:
        if rule.axis not in AXES:
            problems.append(f"the rule {rule} names the mesh axis {rule.axis!r}; the axes are {', '.join(AXES)}")
        hits = {(path, rule.dim_in(path, p), rule.axis) for path, p in named if rule.dim_in(path, p) is not None}
        if not hits:
            known = sorted({axis for _, p in named for axis in p.axes})
            problems.append(f"the rule {rule} matches no parameter; the logical axes are {', '.join(known)}")
        elif hits <= covered:
            problems.append(f"the rule {rule} is shadowed: earlier rules already say all that it says")
        covered |= hits
    return problems


# --- between specs and tensors ----------------------------------------------------------------------------------


def initialize(abstract: Any, plans: Any, mesh: Mesh, seed: int) -> Any:
    """Initial parameters in their stored layout: plain tensors on one rank, DTensors on a mesh.

    The full parameters are bitwise the same for every mesh; a rank makes its own rows only.
    """

    def one(path: str, param: Param, layout: Plan) -> torch.Tensor:
        rows, *rest = local_slices(param.shape, layout.stored, mesh.shape, mesh.rank)
        local = initial_rows(path, param, seed, rows.start, rows.stop)[(slice(None), *rest)]
        return from_local(local.contiguous().to(mesh.device), param.shape, layout.stored, mesh)

    leaves, treedef = tree.flatten(abstract)
    with ThreadPoolExecutor() as pool:  # torch draws without the interpreter's lock
        return tree.unflatten(treedef, list(pool.map(one, tree.names(abstract), leaves, tree.leaves(plans))))


def from_local(local: torch.Tensor, shape: tuple[int, ...], spec: Spec, mesh: Mesh) -> torch.Tensor:
    """This rank's part of a global tensor as a DTensor; on one rank the tensor itself."""
    if mesh.device_mesh is None:
        return local
    stride = torch.empty(shape, device="meta").stride()
    where = placements(spec, mesh.shape)
    return DTensor.from_local(local, mesh.device_mesh, where, run_check=False, shape=torch.Size(shape), stride=stride)


def to_local(value: Any) -> Any:
    """A tree with each DTensor replaced by this rank's part; everything else as it is. No copies."""
    return tree.map(lambda x: x.to_local() if isinstance(x, DTensor) else x, value)


def like(value: Any, template: Any) -> Any:
    """The inverse of `to_local`: a tree of local tensors as DTensors laid out as `template`'s are."""

    def one(local: Any, model: Any) -> Any:
        if not isinstance(model, DTensor) or isinstance(local, DTensor):
            return local
        spec = model._spec
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=model.shape, stride=model.stride()
        )

    return tree.map(one, value, template)


def full(value: Any) -> Any:
    """A tree with each DTensor gathered whole, on every rank. A collective: all ranks must call it."""
    return tree.map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, value)
