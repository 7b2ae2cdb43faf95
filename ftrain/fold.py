"""The layer stack as a fold with an explicit schedule: what is gathered, run, kept and reduced, and when.

`fold` is one primitive to torch.func. Its forward and backward are the two loops below, and the loops are the whole
schedule: there are no hooks. Gathered weights live while their layer runs (two layers with the prefetch); between
forward and backward only the residuals remain, and under `remat` only the layer's input.

    forward    gather i+1 | run i, drop its weights
    backward   gather i-1 | pull i back, drop its weights | reduce i, while i-1 is pulled back

Where nothing is gathered, cast, reduced or run again there is nothing to schedule: autograd alone is quicker then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ftrain import tree
from ftrain.fsdp import Gather
from ftrain.marks import BACKWARD, FORWARD
from ftrain.primitives import without_derivative
from ftrain.transforms import Pullback, add, is_active, linearize
from ftrain.tree import Tree


def kept_layers(remat: str | float, n_layers: int) -> int:
    """How many layers keep their residuals. "none": all; "full": none; a budget in [0, 1]: that share, rounded down.

    The kept ones are the last: their residuals are already spent when the first layers are run again, so the peak
    is never more than the budget says. Counting whole layers means the same in eager and compiled, and the memory
    can be told exactly beforehand.
    """
    if remat == "none":
        return n_layers
    if remat == "full":
        return 0
    return int(float(remat) * n_layers + 1e-9)


def fold(
    block: Callable,
    layers: Sequence[Tree],
    x: torch.Tensor,
    *consts: Any,
    gathers: Sequence[Gather],
    remat: str | float = "none",
) -> torch.Tensor:
    """x -> block(weights_n, ... block(weights_1, x, *consts) ..., *consts), with weights_i gathered from layers[i].

    `layers` are trees that the gather of the same index understands (fsdp.Layer). Differentiable in the layers and
    x, once; under torch.no_grad it keeps nothing.
    """
    if kept_layers(remat, len(layers)) == len(layers) and _nothing_to_schedule(layers, gathers):
        for layer in layers:
            x = block(layer.params, x, *consts)
        return x
    run = _Run(block, tuple(gathers), kept_layers(remat, len(layers)))
    if not torch.is_grad_enabled():
        run.layers, run.consts = tuple(layers), consts
        return run.forward(x, with_residuals=False)
    leaves, run.treedef = tree.flatten((consts, list(layers)))
    return _Fold.apply(run, x, *leaves)


def sum_over_chunks(
    fn: Callable, layer: Tree, xs: Sequence[torch.Tensor], consts: Sequence[tuple], *, gather: Gather
) -> torch.Tensor:
    """sum_i fn(weights, xs[i], *consts[i]), a scalar, with the gradients made in the forward.

    For a loss over a large vocabulary: one chunk's logits exist at a time, and what is kept for the backward is the
    gradient of each x and of this rank's shards. Differentiable in the layer and xs, once.
    """
    if len(xs) == 1 and _nothing_to_schedule([layer], [gather]):
        return fn(layer.params, xs[0], *consts[0])
    if not torch.is_grad_enabled():
        weights = gather.start(layer).wait()
        return sum(fn(weights, x, *c) for x, c in zip(xs, consts, strict=True))
    leaves, treedef = tree.flatten((list(consts), layer))
    total, *_ = _SumOverChunks.apply(_Chunks(fn, gather, treedef, len(xs)), *xs, *leaves)
    return total


def _nothing_to_schedule(layers: Sequence[Tree], gathers: Sequence[Gather]) -> bool:
    """Whether no layer is gathered, cast or reduced. torch.func is always given a primitive: it would record more."""
    return not is_active() and all(gather.is_idle(layer) for gather, layer in zip(gathers, layers, strict=True))


@dataclass
class _Run:
    """One call of a fold: its inputs, and the tape that its forward leaves for its backward."""

    block: Callable
    gathers: tuple[Gather, ...]
    keep: int
    treedef: Any = None  # makes (consts, layers) from the flat tensors that a primitive is given
    consts: tuple = ()
    layers: Sequence[Tree] = ()
    tape: list = field(default_factory=list)
    present: list[bool] = field(default_factory=list)  # which inputs of the primitive got a gradient

    def forward(self, x: torch.Tensor, with_residuals: bool = True) -> torch.Tensor:
        layers, n = self.layers, len(self.layers)
        arriving = self.gathers[0].start(layers[0]) if n else None
        for i in range(n):
            assert arriving is not None
            weights = arriving.wait()
            arriving = self.gathers[i + 1].start(layers[i + 1]) if i + 1 < n else None
            residual: Pullback | torch.Tensor
            with self.gathers[i].during(FORWARD):
                if with_residuals and i >= n - self.keep:
                    y, residual = linearize(self.block, weights, x, *self.consts, keep=self.gathers[i].weights_live_on)
                else:
                    with torch.no_grad():
                        y, residual = self.block(weights, x, *self.consts), x
            if with_residuals:
                self.tape.append((residual, weights if self.gathers[i].keep else None))
            x = y
        return x

    def backward(self, grad: torch.Tensor) -> tuple[torch.Tensor | None, list]:
        layers, n = self.layers, len(self.layers)
        grads: list = [None] * n
        arriving = self._arriving(n - 1)
        for i in reversed(range(n)):
            weights = arriving()
            arriving = self._arriving(i - 1)
            residual, _ = self.tape.pop()
            with self.gathers[i].during(BACKWARD):
                if isinstance(residual, torch.Tensor):
                    _, residual = linearize(self.block, weights, residual, *self.consts, keep=True)
                d_weights, grad = residual(weights, grad)
            del weights, residual
            grads[i] = self.gathers[i].scatter(d_weights)
            if i + 1 < n:
                grads[i + 1].start_replicate()
        return grad, [g.wait(layer) for layer, g in zip(layers, grads, strict=True)]

    def flat_backward(self, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradients of x, consts and layers that there are; `present` says which."""
        d_x, d_layers = self.backward(grad)
        grads = [d_x, *(None for _ in tree.leaves(self.consts)), *(g for d_layer in d_layers for g in d_layer)]
        self.present = [g is not None for g in grads]
        return tuple(g for g in grads if g is not None)

    def _arriving(self, i: int) -> Callable[[], Tree]:
        """Start what layer i's backward needs of its weights: a gather, the kept ones, or nothing."""
        if i < 0:
            return lambda: None
        residual, kept = self.tape[i]
        if kept is not None:
            return lambda: kept
        if not isinstance(residual, torch.Tensor) and not residual.needs_weights:
            return lambda: None
        return self.gathers[i].start(self.layers[i]).wait


# --- the primitives ---------------------------------------------------------------------------------------------
# Only tensors may leave a primitive, so gradients that do not exist (of tokens, of scales) are dropped at its edge and
# put back as None.


@dataclass
class _Chunks:
    """One call of sum_over_chunks."""

    fn: Callable
    gather: Gather
    treedef: Any
    n: int
    present: list[bool] = field(default_factory=list)


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(run: _Run, x: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        run.consts, run.layers = tree.unflatten(run.treedef, list(leaves))
        return run.forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.run = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = iter(without_derivative("fold", ctx.run.flat_backward, grad))
        return None, *(next(grads) if here else None for here in ctx.run.present)


class _SumOverChunks(torch.autograd.Function):
    @staticmethod
    def forward(call: _Chunks, *xs_and_leaves: torch.Tensor) -> tuple:
        xs, leaves = xs_and_leaves[: call.n], list(xs_and_leaves[call.n :])
        consts, layer = tree.unflatten(call.treedef, leaves)
        weights = call.gather.start(layer).wait()
        total, d_weights, d_xs = None, None, []
        for x, const in zip(xs, consts, strict=True):
            with call.gather.during(FORWARD):
                loss, pullback = linearize(call.fn, weights, x, *const, keep=True)
            with call.gather.during(BACKWARD):
                d_w, d_x = pullback(weights, torch.ones_like(loss))
            d_xs.append(d_x)
            total = loss if total is None else total + loss
            d_weights = _add(d_weights, d_w, call.gather.reduce_dtype) if call.n > 1 else d_w
        del weights
        d_layer = call.gather.scatter(d_weights).wait(layer)
        grads = [*d_xs, *(None for _ in tree.leaves(consts)), *d_layer]
        call.present = [g is not None for g in grads]
        return total, *(g for g in grads if g is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])
        ctx.call = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
        grads = iter(without_derivative("sum_over_chunks", _scaled, grad, *ctx.saved_tensors))
        return None, *(next(grads) if here else None for here in ctx.call.present)


def _scaled(factor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # A list of one each: torch's kernel for lists reads wide words also where the factor lies on the device.
    return tuple(torch._foreach_mul([t], factor.to(t.dtype))[0] for t in tensors)


def _add(total: Tree | None, grads: Tree, dtype: torch.dtype) -> Tree:
    """Sum of the chunks' gradients in the dtype they will be reduced in."""
    if total is None:
        return tree.map(lambda g: g.to(dtype, copy=True), grads)
    return add(total, grads)
