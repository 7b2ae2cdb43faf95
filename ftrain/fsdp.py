"""Fully sharded parameters (ZeRO-3): how one layer's shards become weights, and its gradients shards again.

A `Gather` is a plan for layers of one structure. `start(layer)` packs this rank's shards into one buffer, each in the
dtype it travels in, and starts one all-gather over the `shard` axis; `wait()` unpacks the weights. `scatter(grads)`
starts the transpose: one reduce-scatter of the gradients in `reduce_dtype`, then, under HSDP, an all-reduce over
`replicate`. When these run is the fold's business (fold.py), not theirs.

Rows need not divide: every rank sends the same number of padded rows and the surplus is dropped on arrival. On one
rank nothing is packed and nothing moves: a weight is its shard in the compute dtype.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ftrain import tree
from ftrain.collectives import Group
from ftrain.sharding import Mesh, MeshShape, Plan, chunk, local_shape

ALIGN = 16  # bytes; every parameter of a packed buffer starts at a multiple, whatever dtypes share it


class Layer(NamedTuple):
    """What a gather takes: this rank's shards of one layer, and what fp8 knows of them (None without fp8)."""

    params: Any
    fp8: Any = None


@dataclass(frozen=True)
class Wire:
    """How one parameter travels: its whole shape on this rank once gathered, dtypes, and rows sent by each rank."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # on the wire
    compute_dtype: torch.dtype
    padded_rows: int

    @property
    def row_numel(self) -> int:
        total = 1
        for size in self.shape[1:]:
            total *= size
        return total

    def numel(self) -> int:
        """Elements that each rank sends, padding included."""
        return self.padded_rows * self.row_numel

    def offset_after(self, offset: int) -> int:
        """Where the next parameter starts in a buffer in which this one starts at `offset`, in bytes."""
        end = offset + self.numel() * self.dtype.itemsize
        return -(-end // ALIGN) * ALIGN


@dataclass(frozen=True)
class Gather:
    """The plan for gathering layers of one structure. Make it with `make_gather`."""

    wires: tuple[Wire, ...]  # in the order of the parameters' leaves
    treedef: Any
    group: Group  # over `shard`
    replicate: Group
    reduce_dtype: torch.dtype
    keep: bool = False  # keep gathered weights between forward and backward: reshard_after_forward = false

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that each rank contributes to one all-gather."""
        offset = 0
        for wire in self.wires:
            offset = wire.offset_after(offset)
        return offset

    def start(self, layer: Layer) -> "Arriving":
        """Start gathering `layer`. Pure but for the collective: the shards are read, never changed."""
        shards = tree.leaves(layer.params)
        if self.group is None:
            return Arriving(self, shards, None, None)
        ranks = self.group.size()
        buffer = torch.empty(ranks, self.bytes_per_rank, dtype=torch.uint8, device=shards[0].device)
        # The send buffer is this rank's row of the receive buffer: NCCL then gathers in place.
        send = buffer[self.group.rank()]
        slots, offset = [], 0
        for wire, shard in zip(self.wires, shards, strict=True):
            slots.append(_slot(send, offset, wire).view(wire.padded_rows, *wire.shape[1:])[: shard.shape[0]])
            offset = wire.offset_after(offset)
        torch._foreach_copy_(slots, [_without_surplus(shard, slot) for shard, slot in zip(shards, slots, strict=True)])
        work = dist.all_gather_into_tensor(buffer.view(-1), send, group=self.group, async_op=True)
        return Arriving(self, None, buffer, work)

    def scatter(self, grads: Any) -> "InFlight":
        """Start reducing the gradients of the weights to gradients of the shards. `grads`: the weights' structure."""
        grads = tree.leaves(grads)
        if self.group is None:
            reduced = [grad.to(self.reduce_dtype) for grad in grads]
            return InFlight(self, reduced, None, None).start_replicate()
        ranks = self.group.size()
        total = sum(wire.numel() for wire in self.wires)
        even = all(wire.padded_rows * ranks == wire.shape[0] for wire in self.wires)
        make = torch.empty if even else torch.zeros
        buffer = make(ranks, total, dtype=self.reduce_dtype, device=grads[0].device)
        offset = 0
        for wire, grad in zip(self.wires, grads, strict=True):
            pieces = buffer[:, offset : offset + wire.numel()].view(ranks, wire.padded_rows, *wire.shape[1:])
            if wire.padded_rows * ranks == wire.shape[0]:
                pieces.copy_(grad.view(pieces.shape))
            else:
                for rank in range(ranks):
                    start, stop = chunk(wire.shape[0], ranks, rank)
                    pieces[rank, : stop - start].copy_(grad[start:stop])
            offset += wire.numel()
        mine = torch.empty(total, dtype=self.reduce_dtype, device=buffer.device)
        work = dist.reduce_scatter_tensor(mine, buffer.view(-1), group=self.group, async_op=True)
        return InFlight(self, None, (mine, buffer), work)


@dataclass
class Arriving:
    """Weights on their way. `wait()` once."""

    plan: Gather
    shards: list[torch.Tensor] | None
    buffer: torch.Tensor | None
    work: Any

    def wait(self) -> Any:
        """The whole weights of the layer on this rank, in the compute dtype, in the layer's structure."""
        if self.shards is not None:
            weights = [shard.to(wire.compute_dtype) for wire, shard in zip(self.plan.wires, self.shards, strict=True)]
            return tree.unflatten(self.plan.treedef, weights)
        self.work.wait()
        weights, offset = [], 0
        for wire in self.plan.wires:
            rows = _slot(self.buffer, offset, wire).reshape(-1, *wire.shape[1:])
            weights.append(rows[: wire.shape[0]].to(wire.compute_dtype))
            offset = wire.offset_after(offset)
        self.buffer = None
        return tree.unflatten(self.plan.treedef, weights)


@dataclass
class InFlight:
    """Gradients on their way. `start_replicate()` when the reduce-scatter is likely done, then `wait()` once."""

    plan: Gather
    reduced: list[torch.Tensor] | None
    buffers: tuple[torch.Tensor, torch.Tensor] | None
    work: Any
    over_replicas: list = None

    def start_replicate(self) -> "InFlight":
        """Wait for the reduce-scatter and start the all-reduce over `replicate`, if there is one."""
        if self.over_replicas is not None:
            return self
        if self.work is not None:
            self.work.wait()
        mine = self.reduced if self.buffers is None else [self.buffers[0]]
        self.buffers = self.buffers and (self.buffers[0], None)
        self.over_replicas = []
        if self.plan.replicate is not None:
            self.over_replicas = [dist.all_reduce(t, group=self.plan.replicate, async_op=True) for t in mine]
        return self

    def wait(self, layer: Layer) -> list[torch.Tensor | None]:
        """The gradients of `layer`'s leaves: those of this rank's shards, in `reduce_dtype`, summed over `shard` and
        `replicate`; None for what has no gradient."""
        for work in self.start_replicate().over_replicas:
            work.wait()
        grads = self.reduced if self.buffers is None else self._unpacked(self.buffers[0])
        return [*grads, *(None for _ in tree.leaves(layer.fp8))]

    def _unpacked(self, mine: torch.Tensor) -> list[torch.Tensor]:
        ranks, rank = self.plan.group.size(), self.plan.group.rank()
        grads, offset = [], 0
        for wire in self.plan.wires:
            start, stop = chunk(wire.shape[0], ranks, rank)
            piece = mine[offset : offset + wire.numel()].view(wire.padded_rows, *wire.shape[1:])
            grads.append(piece[: stop - start])
            offset += wire.numel()
        return grads


def make_gather(
    abstract: Any,
    plans: Any,
    mesh: Mesh,
    *,
    prefix: str = "",
    compute_dtype: torch.dtype,
    wire_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    keep: bool = False,
) -> Gather:
    """The gather of layers shaped like `abstract` (a tree of Param) laid out by `plans` (a tree of Plan).

    `wire_dtype` is what travels; None: the compute dtype. The parameters' own dtype costs twice the bytes of bf16
    and changes nothing else, since the cast to the compute dtype then happens on arrival.
    """
    wires = []
    for (path, param), plan in zip(tree.named_leaves(abstract), tree.leaves(plans), strict=True):
        wires.append(make_wire(f"{prefix}{path}", param.shape, plan, mesh.shape, wire_dtype or compute_dtype, compute_dtype))
    _, treedef = tree.flatten(abstract)
    return Gather(tuple(wires), treedef, mesh.group("shard"), mesh.group("replicate"), reduce_dtype, keep)


def make_wire(
    path: str, shape: tuple[int, ...], plan: Plan, mesh: MeshShape, dtype: torch.dtype, compute_dtype: torch.dtype
) -> Wire:
    """How a parameter of global `shape` travels on `mesh`. Tensor splits are even, so any rank's shape will do."""
    used = local_shape(shape, plan.compute, mesh, 0)
    return Wire(path, used, dtype, compute_dtype, -(-used[0] // mesh.shard))


def _slot(buffer: torch.Tensor, offset: int, wire: Wire) -> torch.Tensor:
    """The part of a byte buffer (last dim) that one parameter takes, seen in its own dtype."""
    return buffer[..., offset : offset + wire.numel() * wire.dtype.itemsize].contiguous().view(wire.dtype)


def _without_surplus(shard: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    assert shard.shape == slot.shape, f"a shard of shape {tuple(shard.shape)} does not fit its slot {tuple(slot.shape)}"
    return shard
