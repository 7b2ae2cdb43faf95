"""Fully sharded parameters (ZeRO-3): how one layer's shards become weights, and its gradients shards again.

A `Gather` is a plan for layers of one structure. `start(layer)` packs this rank's shards into one buffer, each in the
dtype it travels in, and starts one all-gather over the `shard` axis; `wait()` unpacks the weights. `scatter(grads)`
starts the transpose: one reduce-scatter of the gradients in `reduce_dtype`, then, under HSDP, an all-reduce over
`replicate`. When these run is the fold's business (fold.py), not theirs.

A weight that fp8 multiplies may travel as fp8 codes: its shard is cast with the scale of the whole weight, and the
codes are gathered. Cast, then gather: no tensor subclass could lose that on the way. The fp8 linear layers find an
`Fp8Weight` where it was asked for, and a plain tensor elsewhere.

Rows need not divide: every rank sends the same number of padded rows and the surplus is dropped on arrival. On one
rank nothing is packed and nothing moves: a weight is its shard in the compute dtype.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ftrain import tree
from ftrain.collectives import Group, all_gather_into, all_reduce_max, reduce_scatter_into
from ftrain.fp8.formats import Scaled, amax, cast, scale_from_amax
from ftrain.fp8.linear import scaled_weight
from ftrain.fp8.state import Fp8Weight, WeightState, state_gradients
from ftrain.marks import ARRIVE, GATHER, PACK, REDUCE, REPLICATE, SCATTER, SETTLE, Mark, unmarked
from ftrain.sharding import Mesh, chunk, local_shape

ALIGN = 16  # bytes; every parameter of a packed buffer starts at a multiple, whatever dtypes share it


class Layer(NamedTuple):
    """What a gather takes: this rank's shards of one layer, and what fp8 knows of them (None without fp8)."""

    params: Any
    fp8: Any = None  # a tree of the params' structure: a WeightState where fp8 knows something, else None


@dataclass(frozen=True)
class Wire:
    """How one parameter travels: its whole shape on this rank once gathered, dtypes, and rows sent by each rank."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # on the wire
    compute_dtype: torch.dtype
    padded_rows: int
    fp8: torch.dtype | None = None  # the format that fp8 products take this weight in; None: high precision

    @property
    def is_codes(self) -> bool:
        """Whether fp8 codes travel."""
        return self.dtype == self.fp8

    @property
    def row_numel(self) -> int:
        """Elements of one row: what lies under one index of dim 0."""
        return prod(self.shape[1:])

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
    world: Group  # all ranks: a weight's scale is that of the whole weight
    reduce_dtype: torch.dtype
    keep: bool = False  # keep gathered weights between forward and backward: reshard_after_forward = false
    is_identity: bool = False  # nothing moves and nothing is cast: a weight is its shard
    cast: Callable = cast  # fp8.formats.cast, perhaps compiled
    power_of_two: bool = False  # whether scales that are made here are, as the fp8 recipe says
    mark: Mark = unmarked  # names what runs, for a profile

    @cached_property
    def name(self) -> str:
        """What the parameters' paths begin with, such as "layers.3", or all of them."""
        paths = [wire.path for wire in self.wires]
        return ".".join(commonprefix([path.split(".") for path in paths])) or ", ".join(paths)

    def during(self, phase: str) -> AbstractContextManager:
        """What runs inside is this phase of this layer, to a profile."""
        return self.mark(phase, self.name)

    @property
    def weights_live_on(self) -> bool:
        """Whether the weights are there after their layer has run, whatever anyone keeps of them."""
        return self.keep or self.is_identity

    def is_idle(self, layer: Layer) -> bool:
        """Whether there is nothing to do for `layer`, nor to tell a profile: its weights are its shards as they are."""
        if not (self.group is None and self.replicate is None and self.mark is unmarked):
            return False
        pairs = zip(self.wires, tree.leaves(layer.params), strict=True)
        return all(wire.fp8 is None and shard.dtype == wire.compute_dtype for wire, shard in pairs)

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that each rank contributes to one all-gather."""
        offset = 0
        for wire in self.wires:
            offset = wire.offset_after(offset)
        return offset

    def start(self, layer: Layer) -> "Arriving":
        """Start gathering `layer`. Pure but for the collective: the shards are read, never changed."""
        with self.during(PACK if self.group is None else GATHER):
            return self._start(layer)

    def _start(self, layer: Layer) -> "Arriving":
        shards = tree.leaves(layer.params)
        states = [None] * len(shards) if layer.fp8 is None else self.treedef.flatten_up_to(layer.fp8)
        scales = self._scales(shards, states)
        payloads = [self._payload(*parts) for parts in zip(self.wires, shards, states, scales, strict=True)]
        if self.group is None:
            return Arriving(self, states, scales, payloads, None, None)
        ranks = self.group.size()
        buffer = torch.empty(ranks, self.bytes_per_rank, dtype=torch.uint8, device=shards[0].device)
        # The send buffer is this rank's row of the receive buffer: NCCL then gathers in place.
        send = buffer[self.group.rank()]
        slots, offset = [], 0
        for wire, payload in zip(self.wires, payloads, strict=True):
            slot = _slot(send, offset, wire).view(wire.padded_rows, *wire.shape[1:])[: payload.shape[0]]
            assert slot.shape == payload.shape, f"{wire.path}: a shard of {payload.shape} in a slot of {slot.shape}"
            slots.append(_bytes(slot) if wire.is_codes else slot)
            offset = wire.offset_after(offset)
        payloads = [_bytes(p) if wire.is_codes else p for wire, p in zip(self.wires, payloads, strict=True)]
        torch._foreach_copy_(slots, payloads)
        work = all_gather_into(buffer.view(-1), send, group=self.group, async_op=True)
        return Arriving(self, states, scales, [], buffer, work)

    def _scales(self, shards: list, states: list) -> list[torch.Tensor | None]:
        """The scale of every weight that is cast with one: as precomputed, else from the amax over all ranks, now."""
        scales = [state.scale if state else None for state in states]
        unknown = [i for i, wire in enumerate(self.wires) if wire.is_codes and scales[i] is None]
        if unknown:
            amaxes = torch.stack([amax(shards[i]).float() for i in unknown])
            for i, value in zip(unknown, all_reduce_max(amaxes, self.world).unbind(), strict=True):
                scales[i] = scale_from_amax(value, self.wires[i].dtype, self.power_of_two)
        return scales

    def _payload(self, wire: Wire, shard: torch.Tensor, state: WeightState | None, scale: torch.Tensor | None) -> Any:
        """What this rank sends of one weight: its shard, or codes of it, cast before or now."""
        if not wire.is_codes:
            return shard
        return state.codes if state and state.codes is not None else self.cast(shard, scale, wire.fp8)

    def scatter(self, grads: Any) -> "InFlight":
        """Start reducing the gradients of the weights to gradients of the shards. `grads`: the weights' structure."""
        with self.during(PACK if self.group is None else SCATTER):
            return self._scatter(grads)

    def _scatter(self, grads: Any) -> "InFlight":
        nodes = self.treedef.flatten_up_to(grads)
        grads = [node.gradient if isinstance(node, Fp8Weight) else node for node in nodes]
        observed = [node.observed if isinstance(node, Fp8Weight) else None for node in nodes]
        if self.group is None:
            # With nobody to add to there is nothing to convert for: the optimizer reads any dtype.
            reduced = [grad.to(self.reduce_dtype) for grad in grads] if self.replicate else grads
            return InFlight(self, observed, reduced, None, None).start_replicate()
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
                whole, rest = divmod(wire.shape[0], wire.padded_rows)  # pieces that are full, rows of the next one
                rows = whole * wire.padded_rows
                pieces[:whole].copy_(grad[:rows].view(whole, *pieces.shape[1:]))
                pieces[whole : whole + 1, :rest].copy_(grad[rows:])
            offset += wire.numel()
        mine = torch.empty(total, dtype=self.reduce_dtype, device=buffer.device)
        work = reduce_scatter_into(mine, buffer.view(-1), group=self.group, async_op=True)
        return InFlight(self, observed, [], (mine, buffer), work)


@dataclass
class Arriving:
    """Weights on their way. `wait()` once."""

    plan: Gather
    states: list[WeightState | None]
    scales: list[torch.Tensor | None]
    payloads: list[torch.Tensor]  # on one rank: what would have travelled
    buffer: torch.Tensor | None
    work: Any

    def wait(self) -> Any:
        """The whole weights of the layer on this rank, in the layer's structure: tensors in the compute dtype, and
        `Fp8Weight`s."""
        with self.plan.during(ARRIVE):
            return self._wait()

    def _wait(self) -> Any:
        arrived = self.payloads if self.buffer is None else self._unpacked(self.buffer)
        self.payloads, self.buffer = [], None
        weights = [
            self._weight(*parts) for parts in zip(self.plan.wires, arrived, self.scales, self.states, strict=True)
        ]
        return tree.unflatten(self.plan.treedef, weights)

    def _unpacked(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        self.work.wait()
        self.work = None  # it holds on to the buffer
        arrived, offset = [], 0
        for wire in self.plan.wires:
            arrived.append(_slot(buffer, offset, wire).reshape(-1, *wire.shape[1:])[: wire.shape[0]])
            offset = wire.offset_after(offset)
        return arrived

    def _weight(self, wire: Wire, arrived: torch.Tensor, scale: torch.Tensor | None, state: WeightState | None) -> Any:
        if wire.fp8 is None:
            return arrived.to(wire.compute_dtype)
        history = (state.x, state.g) if state else (None, None)
        if wire.is_codes:
            port = torch.empty((), dtype=wire.compute_dtype, device=arrived.device).expand(arrived.shape)  # never read
            assert scale is not None, f"{wire.path}: codes came without their scale"
            return Fp8Weight(Scaled(arrived, scale, port), *history)
        if scale is not None:
            return Fp8Weight(scaled_weight(arrived, scale, wire.fp8, wire.compute_dtype), *history)
        # Not rounded to the compute dtype on the way: where parameters travel in their own dtype, the linear layer
        # makes the same codes from them that the shards would have made.
        return Fp8Weight(arrived, *history)


@dataclass
class InFlight:
    """Gradients on their way. `start_replicate()` when the reduce-scatter is likely done, then `wait()` once."""

    plan: Gather
    observed: list  # what came out of the histories' ports, see fp8.state
    reduced: list[torch.Tensor]  # where there was nobody to add to
    buffers: tuple[torch.Tensor, torch.Tensor | None] | None
    work: Any
    over_replicas: list | None = None

    def start_replicate(self) -> "InFlight":
        """Wait for the reduce-scatter and start the all-reduce over `replicate`, if there is one."""
        if self.over_replicas is None:
            with self.plan.during(SETTLE):
                self._start_replicate()
        return self

    def _start_replicate(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None  # it holds on to the buffers
        mine = self.reduced if self.buffers is None else [self.buffers[0]]
        self.buffers = self.buffers and (self.buffers[0], None)
        self.over_replicas = []
        if self.plan.replicate is not None:
            with self.plan.during(REPLICATE):
                self.over_replicas = [dist.all_reduce(t, group=self.plan.replicate, async_op=True) for t in mine]

    def wait(self, layer: Layer) -> Sequence[torch.Tensor | None]:
        """The gradients of `layer`'s leaves: those of this rank's shards, in `reduce_dtype`, summed over `shard` and
        `replicate`; None for what has no gradient."""
        with self.plan.during(REDUCE):
            return self._wait(layer)

    def _wait(self, layer: Layer) -> Sequence[torch.Tensor | None]:
        for work in self.start_replicate().over_replicas or ():
            work.wait()
        grads = self.reduced if self.buffers is None else self._unpacked(self.buffers[0])
        if layer.fp8 is None:
            return grads
        states = self.plan.treedef.flatten_up_to(layer.fp8)
        return [*grads, *(leaf for pair in zip(states, self.observed, strict=True) for leaf in state_gradients(*pair))]

    def _unpacked(self, mine: torch.Tensor) -> list[torch.Tensor]:
        assert self.plan.group is not None, "one rank packs nothing"
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
    paths: Any,
    compute_dtype: torch.dtype,
    wire_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    keep: bool = False,
    fp8: Callable[[str], tuple[torch.dtype | None, bool]] = lambda path: (None, False),
    cast: Callable = cast,
    power_of_two: bool = False,
    mark: Mark = unmarked,
) -> Gather:
    """The gather of layers shaped like `abstract` (a tree of Param), laid out by `plans` and named by `paths`.

    wire_dtype: what travels; None: the compute dtype. The parameters' own dtype costs twice the bytes of bf16 and
        changes nothing else, since the cast to the compute dtype then happens on arrival.
    fp8: path -> (the format that fp8 products take this weight in, or None; whether its codes travel).
    power_of_two: of the scales of codes that are made while gathering, since none were given.
    mark: names what runs, for a profile.
    """
    wires, is_identity = [], mesh.group("shard") is None
    for param, plan, path in zip(*(tree.leaves(t) for t in (abstract, plans, paths)), strict=True):
        format, travels = fp8(path)
        dtype = format if format is not None and travels else wire_dtype or compute_dtype
        used = local_shape(param.shape, plan.compute, mesh.shape, 0)  # splits over `tensor` are even: any rank's
        wires.append(Wire(path, used, dtype, compute_dtype, -(-used[0] // mesh.shape.shard), format))
        is_identity = is_identity and format is None and param.dtype == compute_dtype
    _, treedef = tree.flatten(abstract)
    groups = (mesh.group("shard"), mesh.group("replicate"), mesh.world)
    return Gather(tuple(wires), treedef, *groups, reduce_dtype, keep, is_identity, cast, power_of_two, mark)


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)  # neither gloo nor a copy of many tensors at once knows fp8


def _slot(buffer: torch.Tensor, offset: int, wire: Wire) -> torch.Tensor:
    """The part of a byte buffer (last dim) that one parameter takes, seen in its own dtype."""
    return buffer[..., offset : offset + wire.numel() * wire.dtype.itemsize].contiguous().view(wire.dtype)
