"""Function transforms: linearize (run now, pull gradients back later), accumulate over micro-batches, jit.

`torch.func` is the outermost transform of a train step; what is here makes the primitives below it.
"""

import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from ftrain import tree
from ftrain.primitives import without_derivative
from ftrain.tree import Tree

# --- linearize --------------------------------------------------------------------------------------------------


class Pullback(NamedTuple):
    """The backward half of a linearized call. Holds residuals, and the weights only where they were to be kept."""

    output: torch.Tensor  # attached to the autograd graph of this one call
    leaves: list  # (weights, x), or the gradient edges of their ports; None: not differentiable
    treedef: Any
    slot: "_WeightSlot"

    @property
    def needs_weights(self) -> bool:
        """Whether the backward reads any weight (an embedding's does not)."""
        return self.slot.used

    def __call__(self, weights: Tree | None, cotangent: torch.Tensor) -> tuple[Tree, torch.Tensor | None]:
        """Gradients of (weights, x). `weights` must equal those of the forward; None where not `needs_weights`.

        The weights' gradient has the structure of the weights, with None for leaves that have none. Usable once.
        """
        self.slot.weights = [] if weights is None else tree.leaves(weights)
        wanted = [edge for edge in self.leaves if edge is not None]
        grads = iter(torch.autograd.grad(self.output, wanted, cotangent, allow_unused=True))
        self.slot.weights = []
        *d_weights, d_x = [None if edge is None else next(grads) for edge in self.leaves]
        return tree.unflatten(self.treedef, d_weights), d_x


def linearize(
    fn: Callable, weights: Tree, x: torch.Tensor, *consts: Any, keep: bool = False
) -> tuple[torch.Tensor, Pullback]:
    """`fn(weights, x, *consts)` and the function that pulls a cotangent back to (weights, x).

    Unlike a closure of torch.func.vjp, the pullback does not keep the weights alive: wherever autograd saves one,
    or a view of one, only its place is kept, and `pullback(weights, cotangent)` is handed the weights again. That
    is what lets gathered weights live only while their layer runs. Works for eager and compiled `fn`.
    keep: the weights may be kept, since they live on anyway; autograd alone then does, which is quicker.
    """
    leaves, treedef = tree.flatten(weights)
    edges: list[Any]
    if keep:
        *leaves, x = edges = [_differentiable(leaf) for leaf in (*leaves, x)]
        with torch.enable_grad():
            y = fn(tree.unflatten(treedef, leaves), x, *consts)
        edges = [leaf if leaf.requires_grad else None for leaf in edges]
        return y.detach(), Pullback(y, edges, treedef, _WeightSlot([]))
    ports = [_port(leaf) for leaf in (*leaves, x)]
    with torch.enable_grad():
        *leaves, x = _AtPorts.apply(len(ports), *ports, *(leaf.detach() for leaf in (*leaves, x)))
    slot = _WeightSlot(leaves)
    with torch.enable_grad(), _saved_tensors_hooks_allowed(), saved_tensors_hooks(slot.pack, slot.unpack):
        y = fn(tree.unflatten(treedef, leaves), x, *consts)
    edges = [None if port is None else torch.autograd.graph.get_gradient_edge(port) for port in ports]
    slot.seal()
    return y.detach(), Pullback(y, edges, treedef, slot)


def _has_gradient(leaf: torch.Tensor) -> bool:
    return leaf.is_floating_point() and leaf.element_size() > 1  # fp8 codes have none


def _differentiable(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().requires_grad_(_has_gradient(leaf))


def _port(leaf: torch.Tensor) -> torch.Tensor | None:
    """Where the gradient of `leaf` comes out: a tensor of its shape that occupies one number. None: it has none.

    The graph holds on to its leaves, so a weight must not be one: it would live until the pullback has run.
    """
    if not _has_gradient(leaf):
        return None
    return torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape).requires_grad_()


class _AtPorts(torch.autograd.Function):
    """Tensors as functions of their ports. One node for all: a node each would cost more than it does."""

    @staticmethod
    def forward(n: int, *ports_and_leaves: Any) -> tuple[torch.Tensor, ...]:
        return tuple(leaf.view_as(leaf) for leaf in ports_and_leaves[n:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        n, *ports = inputs[: inputs[0] + 1]
        ctx.n = n
        ctx.mark_non_differentiable(*(out for out, port in zip(output, ports, strict=True) if port is None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *grads, *(None for _ in range(ctx.n))


class _View(NamedTuple):
    leaf: int  # which
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the start of the leaf


class _WeightSlot:
    """Where a pullback's weights are put back: saved weights are packed as places, unpacked as tensors."""

    def __init__(self, leaves: list[torch.Tensor]):
        self.weights: list[torch.Tensor] = []
        self.used = False
        self._places: dict[int, list[tuple]] = {}  # storage -> leaves in it; only until the forward has run
        for index, leaf in enumerate(leaves):
            if leaf.numel():
                place = index, leaf.dtype, leaf.storage_offset(), leaf.numel()
                self._places.setdefault(_storage(leaf), []).append(place)

    def seal(self) -> None:
        self._places = {}

    def pack(self, saved: torch.Tensor) -> Any:
        for index, dtype, start, numel in self._places.get(_storage(saved), ()):
            offset = saved.storage_offset() - start
            if dtype == saved.dtype and 0 <= offset < numel and saved.numel():
                self.used = True
                return _View(index, saved.size(), saved.stride(), offset)
        return saved.detach()  # an output saved with its own node is a cycle that only the collector would free

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        leaf = self.weights[packed.leaf]
        return leaf.as_strided(packed.size, packed.stride, leaf.storage_offset() + packed.offset)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # the storage itself: fake tensors have one, and no address


@contextmanager
def _saved_tensors_hooks_allowed() -> Iterator[None]:
    """torch.func forbids saved-tensor hooks while a transform is active, because a hook could see its wrappers.

    Inside a custom primitive the tensors are plain ones, so the ban is lifted for the span of the call.
    """
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if message is None:
        yield
        return
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_disable(message)


# --- gradients --------------------------------------------------------------------------------------------------


def grad_and_value(fn: Callable[..., tuple[torch.Tensor, Any]]) -> Callable[..., tuple[Tree, tuple[torch.Tensor, Any]]]:
    """`fn(tree, *args) -> (scalar, aux)` to `(tree, *args) -> (gradient tree, (scalar, aux))`, by torch.func.

    The tree is flattened by optree first: torch's own pytree keeps the order in which a dict was built, and takes
    None for a leaf. A gradient has the dtype that it was made in, such as bfloat16 for a float32 parameter used in
    bfloat16: converting it is a pass over memory that an optimizer that reads both dtypes has no use for.
    """

    def of(params: Tree, *args: Any) -> tuple[Tree, tuple[torch.Tensor, Any]]:
        leaves, treedef = tree.flatten(params)

        def flat(leaves: tuple, *args: Any) -> tuple[torch.Tensor, Any]:
            for leaf in leaves:
                leaf.grad_dtype = None  # any
            return fn(tree.unflatten(treedef, list(leaves)), *args)

        grads, value = torch.func.grad_and_value(flat, has_aux=True)(tuple(leaves), *args)
        return tree.unflatten(treedef, list(grads)), value

    return of


def is_active() -> bool:
    """Whether a transform of torch.func is at work on what is called now; inside a primitive none is."""
    return torch._C._are_functorch_transforms_active()


# --- accumulate -------------------------------------------------------------------------------------------------


def accumulate(fn: Callable, batches: Sequence[Any], combine: Callable) -> Callable[[Tree], tuple[torch.Tensor, list]]:
    """`fn(tree, batch) -> (scalar, aux)` to `tree -> (sum of the scalars, the (scalar, aux) of every batch)`.

    combine: (total, grads) -> the gradients so far; (total, grads, factor) -> with total times a 0-d factor. `add`,
        where the scalars are sums over tokens: every token weighs the same, however tokens fall in batches.

    The sum is one primitive to torch.func: its bookkeeping for every leaf of every primitive would take a CPU as long
    as a small layer takes. Inside, autograd records, one batch at a time: a batch is pulled back before the next one
    runs, the last one by the backward, whose cotangent is the factor of the others. Differentiable once.
    """

    def of(params: Tree) -> tuple[torch.Tensor, list]:
        leaves, treedef = tree.flatten(params)
        call = _Sum(fn, batches, combine, treedef)
        total, *values = _Accumulate.apply(call, *leaves)
        return total, tree.unflatten(call.valuesdef, values)

    return of


@dataclass
class _Sum:
    """One call of accumulate, and what its forward leaves for its backward."""

    fn: Callable
    batches: Sequence[Any]
    combine: Callable
    treedef: Any
    valuesdef: Any = None
    total: Tree | None = None  # gradients of all batches but the last
    pullback: Callable[[torch.Tensor], Tree] | None = None  # of the last

    def forward(self, params: Tree) -> list[tuple[torch.Tensor, Any]]:
        values: list[tuple[torch.Tensor, Any]] = []
        for batch in self.batches:
            if self.pullback is not None:
                grads, self.pullback = self.pullback(torch.ones_like(values[-1][0])), None
                self.total = grads if self.total is None else self.combine(self.total, grads)
                del grads  # else they would live until the next ones are made: a third tree of gradients
            value, self.pullback = _recorded(self.fn, params, batch)
            values.append(value)
        return values

    def backward(self, cotangent: torch.Tensor) -> Tree:
        assert self.pullback is not None, "the backward of accumulate runs once, after its forward"
        grads, self.pullback = self.pullback(cotangent), None
        return grads if self.total is None else self.combine(self.total, grads, cotangent)

    def flat_backward(self, cotangent: torch.Tensor, _total: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tree.leaves(self.backward(cotangent)))


def _recorded(fn: Callable, params: Tree, batch: Any) -> tuple[tuple[torch.Tensor, Any], Callable]:
    """fn(params, batch), and the function from a cotangent of its scalar to the gradients of params, by autograd."""
    leaves, treedef = tree.flatten(params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    for leaf in leaves:
        leaf.grad_dtype = None  # any
    with torch.enable_grad():
        value, aux = fn(tree.unflatten(treedef, leaves), batch)

    def pullback(cotangent: torch.Tensor) -> Tree:
        if not value.requires_grad:
            return tree.unflatten(treedef, [torch.zeros_like(leaf) for leaf in leaves])
        return tree.unflatten(treedef, list(torch.autograd.grad(value, leaves, cotangent, materialize_grads=True)))

    return (value.detach(), tree.map(torch.Tensor.detach, aux)), pullback


class _Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(call: _Sum, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = call.forward(tree.unflatten(call.treedef, list(leaves)))
        flat, call.valuesdef = tree.flatten(values)
        return sum(value for value, _ in values), *flat

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(output[0])
        ctx.call = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
        # The total is passed only so that a second derivative comes there, and is refused.
        return None, *without_derivative("accumulate", ctx.call.flat_backward, grad, *ctx.saved_tensors)


def add(total: Tree, grads: Tree, factor: torch.Tensor | None = None) -> Tree:
    """total (times factor, 0-d) + grads in float32 or better, in total's buffers where they are.

    A buffer that two leaves share, as the gradient of both terms of a sum may be, or that is a number repeated, is
    left alone.
    """
    tree.check_same_structure(total, grads)
    leaves, treedef = tree.flatten(total)
    places = [_place(leaf) for leaf in leaves]
    often = Counter(places)
    wide = [leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in leaves]
    for i, leaf in enumerate(leaves):
        if wide[i] is leaf and (often[places[i]] > 1 or 0 in leaf.stride()):
            wide[i] = leaf.clone(memory_format=torch.contiguous_format)
    if factor is not None:
        for leaf, grad in zip(wide, tree.leaves(grads), strict=True):
            torch.addcmul(grad, leaf, factor, out=leaf)
    elif wide:
        torch._foreach_add_(wide, tree.leaves(grads))
    return tree.unflatten(treedef, wide)


def _place(leaf: torch.Tensor) -> tuple[int, int]:
    return _storage(leaf), int(leaf.storage_offset())


def maximum(total: Tree, values: Tree) -> Tree:
    """The larger of each pair; NaN stays NaN."""
    return tree.map(torch.maximum, total, values)


# --- jit --------------------------------------------------------------------------------------------------------


def jit(fn: Callable) -> Callable:
    """`fn` compiled whole: one graph a shape, an error where it would break.

    As with jax.jit, what `fn` reads besides its arguments counts as it was at the first call.
    """

    def alone(*args: Any) -> Any:
        return fn(*args)

    # torch counts compilations per code object and refuses the ninth: models of one session must not share one.
    alone.__code__ = alone.__code__.replace()
    return torch.compile(alone, fullgraph=True, dynamic=False, options={"guard_filter_fn": _on_arguments})


def _on_arguments(guards: Sequence[Any]) -> list[bool]:
    """Which of dynamo's guards are checked at each call: those on `args` of `jit`, and the nameless ones on torch's own
    state. Those on `fn` and on all that it reads take longer than these."""
    return [not guard.name or guard.name.startswith("args") for guard in guards]


def why_no_jit(device: torch.device) -> str | None:
    """Why `jit` cannot work on this machine, in a sentence; None when it can."""
    if device.type == "cpu":
        compilers = [c for c in (sysconfig.get_config_var("CXX"), "g++", "clang++") if c]
        if not any(shutil.which(c.split()[0]) for c in compilers):
            return "torch.compile needs a C++ compiler on the CPU and found none (g++ or clang++): running eager"
    return None
