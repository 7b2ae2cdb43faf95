"""One optimizer step of one rank, gone through without data, memory or peers.

The step is the real one: Run, model, fold, gathers and optimizer as they are, on the meta device, where tensors have
shapes and no values, over a `PlannedMesh`. What a step communicates and holds is read off it, not computed a second
time. Three things differ from a run. Nothing is compiled: where a run would be, tensors that the compiler fuses away
are not counted. The optimizer's update in place is left out. At most three micro-batches are gone through: the first
has no sum to add to, the second begins one, any further one does as the third.
"""

import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from ftrain import tree
from ftrain.launch import World
from ftrain.recipe import Recipe
from ftrain.report.ledger import Ledger
from ftrain.report.planned import PlannedMesh
from ftrain.run import Run
from ftrain.sharding import MeshShape, local_shape
from ftrain.step import TrainState, init_state, make_train_step
from ftrain.tree import Tree

# What a storage is for, by the first of these functions that was running when it was made.
PARAMETERS, OPTIMIZER, FP8_STATE, GRADIENTS = "parameters", "optimizer state", "fp8 state", "gradients"
UNDER_WAY, GATHERED, ACTIVATIONS = "gradients under way", "gathered weights", "activations"
LOGITS, BACKWARD, OTHER = "logits", "backward", "other"
_KINDS = (
    ("fsdp.Gather.scatter", UNDER_WAY),
    ("fsdp.InFlight", UNDER_WAY),
    ("fold._add", UNDER_WAY),
    ("fold._scaled", UNDER_WAY),
    ("fsdp.", GATHERED),
    ("fold._SumOverChunks", LOGITS),
    ("transforms.Pullback", BACKWARD),
    ("fold.", ACTIVATIONS),
)
FUSED = (ACTIVATIONS, LOGITS, BACKWARD)  # made in compiled code, where a recipe compiles

MICRO_BATCHES = 3  # how many are gone through


class Site(NamedTuple):
    """A place in the code that communicates: operation, mesh axis, dtype on the wire, the functions around it."""

    op: str
    axis: str
    dtype: torch.dtype
    makers: tuple[str, ...]


class PerElement(NamedTuple):
    """Bytes that the gradient and the optimizer's state take for each element of a parameter."""

    gradient: int
    optimizer: int


@dataclass(frozen=True)
class Rehearsal:
    """What one step of one rank did. Memory is in bytes by kind, those above.

    counts, sent: of every place that communicates, how often it is called and the bytes it puts in, in one step.
    start: alive before the step. Of the last micro-batch, saved: alive between forward and backward; done: when its
    gradients are made and not yet added to the others; forward, backward: at the peak before and after its loss is
    known. most: the most of each kind at any time. per_element: by path.
    """

    counts: Counter
    sent: Counter
    start: Counter
    saved: Counter
    done: Counter
    forward: Counter
    backward: Counter
    most: Counter
    per_element: dict[str, PerElement]

    @property
    def peak(self) -> Counter:
        """What is alive when the most is."""
        return max(self.forward, self.backward, key=Counter.total)


class _Marks:
    """Moments of a rehearsal, as (changes, calls) seen so far, and the tensors of interest."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.params: int = 0
        self.start = self.done = (0, 0)
        self.losses: list[tuple[int, int]] = []  # where each micro-batch begins
        self.known: int = 0  # where the last loss is known
        self.optimizer: set[int | None] = set()
        self.gradients: list[torch.dtype] = []
        self.gradient_storages: set[int] = set()

    def now(self) -> tuple[int, int]:
        return len(self.ledger.changes), len(self.ledger.calls)


def rehearse(recipe: Recipe, shape: MeshShape, rank: int = 0, most: int = MICRO_BATCHES) -> Rehearsal:
    """Go through one step of `rank` on a mesh of `shape`. Raises as Run does for what cannot work there.

    most: micro-batches to go through, if there are so many. Two do for the collectives; memory needs all three.
    """
    planned = PlannedMesh(shape, rank)
    mesh = planned.as_mesh()
    eager = replace(recipe, train=replace(recipe.train, compile=False))
    run = Run(eager, World(rank, shape.size), mesh.device, mesh)
    micro_batches = min(run.micro_batches, most)
    ledger = Ledger()
    marks = _Marks(ledger)

    def loss(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        marks.losses.append(marks.now())
        value = run.model.loss(*args, **kwargs)
        marks.known = marks.now()[0]
        return value

    def norm(grads: Tree) -> torch.Tensor:
        marks.done = marks.now()
        leaves = tree.leaves(grads)
        marks.gradients = [leaf.dtype for leaf in leaves]
        numbers = [ledger.number_of(leaf) for leaf in leaves]
        marks.gradient_storages = {number for number in numbers if number is not None}
        assert run.optimizer.norm is not None
        return run.optimizer.norm(grads)

    def in_place(grads: Tree, state: Tree, params: Tree, **_: Any) -> tuple[Tree, Tree]:
        return params, state

    optimizer = run.optimizer._replace(norm=norm, apply=run.optimizer.apply and in_place)
    step = make_train_step(
        loss,
        optimizer,
        run.post,
        mesh=mesh,
        plans=run.plans,
        micro_batches=micro_batches,
        donate=True,
        prepare=run.execution.prepare,
    )
    with warnings.catch_warnings(), planned.known(), ledger:
        warnings.simplefilter("ignore")
        params = tree.map(
            lambda param, plan: torch.empty(
                local_shape(param.shape, plan.stored, shape, rank), dtype=param.dtype, device=mesh.device
            ),
            run.abstract,
            run.plans,
        )
        marks.params = marks.now()[0]
        state = init_state(params, run.optimizer, run.post)
        marks.optimizer = {ledger.number_of(leaf) for leaf in _tensors(state.opt_state)}
        per_element = _state_bytes(state)
        marks.start = marks.now()
        del params
        state, _ = step(state, _batch(recipe, micro_batches, mesh.device))
        gradients = dict(zip(tree.names(run.abstract), marks.gradients, strict=True))
    sizes = {path: PerElement(dtype.itemsize, per_element[path]) for path, dtype in gradients.items()}
    return _read(marks, run.micro_batches, sizes, fused=recipe.train.compile)


def _batch(recipe: Recipe, micro_batches: int, device: torch.device) -> dict[str, torch.Tensor]:
    size = (recipe.train.micro_batch_size * micro_batches, recipe.data.seq_len)
    names = ("tokens", "targets", "segments") if recipe.data.document_mask else ("tokens", "targets")
    return {name: torch.zeros(size, dtype=torch.int64, device=device) for name in names}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor)]


def _state_bytes(state: TrainState) -> dict[str, int]:
    """Bytes of optimizer state for an element of each parameter: leaves whose paths end in the parameter's."""
    sizes = dict.fromkeys(tree.names(state.params), 0)
    shapes = {path: leaf.shape for path, leaf in tree.named_leaves(state.params)}
    for name, leaf in tree.named_leaves(state.opt_state):
        path = tree.ending(name, sizes)
        if path is not None and isinstance(leaf, torch.Tensor) and leaf.shape == shapes[path]:
            sizes[path] += leaf.dtype.itemsize
    return sizes


def _read(marks: _Marks, micro_batches: int, per_element: dict[str, PerElement], fused: bool) -> Rehearsal:
    ledger, start = marks.ledger, marks.start[0]
    kind_of = cache(_kind)
    kinds = [kind_of(made_by) for made_by in ledger.makers]
    for index, change in enumerate(ledger.changes[:start]):
        is_optimizers = change.storage in marks.optimizer
        kinds[change.storage] = PARAMETERS if index < marks.params else OPTIMIZER if is_optimizers else FP8_STATE
    for storage in marks.gradient_storages:
        kinds[storage] = GRADIENTS

    begins = [changes for changes, _ in marks.losses]
    moments = {start, marks.known, marks.done[0], *begins}
    alive: Counter[str] = Counter()
    most: Counter[str] = Counter()
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    at: dict[int, Counter[str]] = {}
    for index, (storage, nbytes) in enumerate(ledger.changes):
        if index in moments:
            at[index] = alive.copy()
        kind = kinds[storage]
        if fused and kind in FUSED and storage not in ledger.solid:
            continue
        alive[kind] += nbytes
        if index < start or nbytes < 0:
            continue
        most[kind] = max(most[kind], alive[kind])
        if begins[-1] <= index < marks.known and alive.total() > forward.total():
            forward = alive.copy()
        elif index >= marks.known and alive.total() > backward.total():
            backward = alive.copy()

    counts: Counter[Site] = Counter()
    sent: Counter[Site] = Counter()
    *_, last_but_one, last = [0, *(calls for _, calls in marks.losses)]
    left_out = micro_batches - len(begins)
    for index, call in enumerate(ledger.calls[marks.start[1] :], marks.start[1]):
        times = 1 + left_out if last_but_one <= index < last else 1
        site = Site(call.op, call.axis, call.dtype, call.makers)
        counts[site] += times
        sent[site] += times * call.nbytes
    saved, done = at[marks.known], at[marks.done[0]]
    if len(begins) > 1:  # what the first micro-batch left is what each of them makes
        done = done + at[begins[1]]
        done.subtract(at[start])
    return Rehearsal(counts, sent, at[start], saved, done, forward, backward, most, per_element)


def _kind(makers: tuple[str, ...]) -> str:
    return next((kind for start, kind in _KINDS if any(name.startswith(start) for name in makers)), OTHER)
