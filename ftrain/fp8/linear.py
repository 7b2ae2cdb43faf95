"""The differentiable fp8 product: one cast of x serves several weights.

Letters: T tokens (B batch by S sequence), K inputs, N outputs. Weights are (N, K). A weight is either a
high-precision tensor, cast here as the recipe says, or a `Scaled`: codes that were cast, and perhaps
gathered, before. The gradient of a `Scaled` goes to its port.

`column` and `row` are the two tensor-parallel forms, with the sequence split between layers: column gathers
x's codes and leaves N split; row takes K split and reduce-scatters its output. Codes travel as bytes (gloo
knows no fp8), sums in high precision. A scale that spans ranks comes from the maximum over them, so that the
codes are those that one rank alone would make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ftrain import collectives
from ftrain.kernels.transpose import transposed_after

from . import formats, sequence
from .casts import Codes, cast_all, jobs, shared
from .formats import Scaled
from .matmul import block_scaled_mm, scaled_mm
from .recipes import SPLIT, Product, Recipe, left, operands, right


class History(NamedTuple):
    """A tensor's scale as known before the step, and a way for its amax to come out of the backward.

    scale: float32 (), or None to scale by this tensor's own amax (the first step of all). port: a float32 0-d
    tensor; the cotangent that it receives is not a derivative but the amax that was observed on this rank.
    Because it comes out of the backward, neither recomputation nor validation can advance a history. Use a
    port once: cotangents add.
    """

    scale: Tensor | None
    port: Tensor


def linear(
    x: Tensor,
    weights: Sequence[Tensor | Scaled],
    recipe: Recipe,
    *,
    x_history: History | None = None,
    g_histories: Sequence[History] | None = None,
) -> tuple[Tensor, ...]:
    """``x @ w.T`` for every weight, as the recipe says, differentiable in x and the weights.

    x: (..., K) float32 or bfloat16. weights: (N, K) tensors or `Scaled`. x_history, g_histories (one a
    weight): for recipes whose scales have a history. Returns one (..., N) tensor a weight, in x's dtype.
    Gradients have the dtype of what they are the gradient of. Raises ValueError where the recipe cannot use
    what it is given.
    """
    return _apply(x, weights, recipe, "local", None, x_history, g_histories)


def column(
    x: Tensor,
    weights: Sequence[Tensor | Scaled],
    recipe: Recipe,
    group: ProcessGroup | None,
    *,
    x_history: History | None = None,
    g_histories: Sequence[History] | None = None,
) -> tuple[Tensor, ...]:
    """Column-parallel `linear`: x (B, S/n, K) and weights (N/n, K) to outputs (B, S, N/n).

    x's codes are gathered along S, once for all weights; the gradient of x is reduce-scattered along S. Where
    a product needs x in high precision, x is gathered so. n is the group's size; a group of None is `linear`.
    """
    return _apply(x, weights, recipe, "column", group, x_history, g_histories)


def row(
    x: Tensor,
    weight: Tensor | Scaled,
    recipe: Recipe,
    group: ProcessGroup | None,
    *,
    x_history: History | None = None,
    g_history: History | None = None,
) -> Tensor:
    """Row-parallel `linear`: x (B, S, K/n) and a weight (N, K/n) to the output (B, S/n, N).

    The output is reduce-scattered along S; the codes of its gradient are gathered along S. A group of None is
    `linear`.
    """
    return _apply(x, [weight], recipe, "row", group, x_history, None if g_history is None else [g_history])[0]


def scaled_weight(w: Tensor, scale: Tensor, dtype: torch.dtype, grad_dtype: torch.dtype) -> Scaled:
    """w cast to fp8 with a known scale: a `Scaled` whose gradient, of grad_dtype, is handed back to w."""
    return Scaled(formats.cast(w.detach(), scale, dtype), scale, formats.port_of(w, grad_dtype))


class _Plan(NamedTuple):
    """What is static in a call: the recipe, where the ranks stand, whether the weight came as codes, and
    whether the codes of x that grad_weight takes are transposed already."""

    recipe: Recipe
    form: str
    group: ProcessGroup | None
    weight_is_codes: bool
    x_is_transposed: bool


def _apply(
    x: Tensor,
    weights: Sequence[Tensor | Scaled],
    recipe: Recipe,
    form: str,
    group: ProcessGroup | None,
    x_history: History | None,
    g_histories: Sequence[History] | None,
) -> tuple[Tensor, ...]:
    if group is None or group.size() == 1:
        form, group = "local", None
    _refuse(x, weights, recipe, form, group, x_history, g_histories)
    first, second = left(recipe, "output"), right(recipe, "grad_weight")
    x_scale, x_split = None, SPLIT[form]["x"]
    if x_history is not None:
        x_scale = x_history.scale
        x = _Observe.apply(x, x_history.port, formats.amax(x.detach()).float())

    # In column form x travels as codes if codes are all that the products need; its gradient then comes to a
    # port.
    main, source = x, x
    gather_codes = form == "column" and first is not None and second is not None
    if gather_codes:
        main = sequence.gathered_port(x, group)
    elif form == "column":
        main = source = collectives.all_gather(x, x.ndim - 2, group)
        x_split = ""

    uses = [("output", first), ("grad_weight", second if torch.is_grad_enabled() else None)]
    todo = jobs(source.detach().flatten(0, -2), "x", x_split, uses, x_scale, both=not gather_codes)
    n_x = len(todo)
    for w in weights:
        if not isinstance(w, Scaled):
            todo += jobs(w.detach(), "w", SPLIT[form]["w"], [("output", right(recipe, "output"))])
    codes = cast_all(todo, group)
    x_codes, w_codes = codes[:n_x], iter(codes[n_x:])
    if gather_codes:
        x_codes = [Codes(*sequence.gather_codes(c.data, c.scale, x.shape[:-1], group)) for c in x_codes]
    none: tuple[Any, Any] = (None, None)
    for_output = x_codes[0][:2] if first else none
    once = shared(first, second)  # then grad_weight takes the codes of output, and they are not passed twice
    for_grad_weight = none if once or not x_codes or not second else x_codes[-1][:2]
    transposed = once and x_codes[0].data_t is not None
    if transposed:
        for_grad_weight = (x_codes[0].data_t, x_codes[0].scale)

    outputs = []
    mains = _FanOut.apply(main, len(weights)) if len(weights) > 1 else (main,)
    for i, w in enumerate(weights):
        g_history = none if g_histories is None else g_histories[i]
        weight: tuple[Any, Any]
        if isinstance(w, Scaled):
            w_main, weight = w.port, (w.data, w.scale)
        else:
            w_main, weight = w, next(w_codes)[:2] if first else none
        plan = _Plan(recipe, form, group, isinstance(w, Scaled), transposed)
        args = (*for_output, *for_grad_weight, w_main, *weight, *g_history)
        outputs.append(_Product.apply(plan, mains[i], *args))
    return tuple(outputs)


def _refuse(
    x: Tensor,
    weights: Sequence[Tensor | Scaled],
    recipe: Recipe,
    form: str,
    group: ProcessGroup | None,
    x_history: History | None,
    g_histories: Sequence[History] | None,
) -> None:
    if x.ndim < 2:
        raise ValueError(f"fp8 linear: x is {tuple(x.shape)}; it needs a dim of tokens and one of features.")
    if form != "local" and any(operand.granularity == "block" for _, _, operand in operands(recipe)):
        raise ValueError(
            f"{form}-parallel fp8 linear with recipe {recipe.name!r}: a block of 128 would lie on two ranks."
        )
    if group is not None and form == "row" and x.shape[-2] % group.size():
        raise ValueError(
            f"row-parallel fp8 linear: x is {tuple(x.shape)}; its sequence, {x.shape[-2]}, must be a "
            f"multiple of the {group.size()} ranks that the output is scattered over."
        )
    w_operand, name = right(recipe, "output"), f"recipe {recipe.name!r}"
    for i, w in enumerate(weights):
        if isinstance(w, Scaled) and not (recipe.output and recipe.grad_input):
            raise ValueError(f"weight {i} is fp8, but {name} uses it in high precision; pass it so.")
        if not isinstance(w, Scaled) and w_operand and w_operand.scale == "history":
            raise ValueError(
                f"weight {i} is in high precision, but {name} scales it by its history, which is known "
                "outside; cast it first, with scaled_weight."
            )
    for product in ("grad_input", "grad_weight"):
        operand = left(recipe, product)
        if operand and operand.scale == "history" and g_histories is None:
            raise ValueError(f"{name} scales gradients by their history; pass g_histories.")
    for operand in (left(recipe, "output"), right(recipe, "grad_weight")):
        if operand and operand.scale == "history" and x_history is None:
            raise ValueError(f"{name} scales x by its history; pass x_history.")


# Dynamo ignores the backward of an autograd.Function inside torch.compile(torch.func.grad(...)) and
# differentiates its forward instead, which for a cast is silently zero; allow_in_graph keeps the Function
# whole.
@torch.compiler.allow_in_graph
class _FanOut(torch.autograd.Function):
    """x for each of n uses. Their gradients sum in float32 and are rounded once, eager and compiled alike."""

    @staticmethod
    def forward(x: Tensor, n: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(n))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [grad for grad in grads if grad is not None]
        total = used[0].to(torch.float32)
        for grad in used[1:]:
            total = total + grad
        return total.to(used[0].dtype), None


@torch.compiler.allow_in_graph
class _Observe(torch.autograd.Function):
    """x itself; in the backward, its amax goes out as the cotangent of port."""

    @staticmethod
    def forward(x: Tensor, port: Tensor, amax: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, ctx.saved_tensors[0].view_as(ctx.saved_tensors[0]), None


@torch.compiler.allow_in_graph
class _Product(torch.autograd.Function):
    """One weight's three products. x and w take the gradients; codes, where there are any, are multiplied.

    Saved are x's codes for grad_weight (or x, where that is in high precision), and the weight's codes if it
    came as codes, else the weight itself: that one is somebody's parameter and costs nothing to keep, its codes would.
    """

    @staticmethod
    def forward(
        plan: _Plan,
        x: Tensor,
        x_data: Any,
        x_scale: Any,
        xt_data: Any,
        xt_scale: Any,
        w: Tensor,
        w_data: Any,
        w_scale: Any,
        g_scale: Any,
        g_port: Any,
    ) -> Tensor:
        product = plan.recipe.output
        if product is None:
            y = x.flatten(0, -2) @ w.t().to(x.dtype)
        else:
            y = _product(product, Codes(x_data, x_scale), Codes(w_data, w_scale), x.dtype)
        y = y.view(*x.shape[:-1], y.shape[-1])
        if plan.form == "row":
            y = collectives.reduce_scatter(y, y.ndim - 2, plan.group)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        plan, x, x_data, x_scale, xt_data, xt_scale, w, w_data, w_scale, g_scale, g_port = inputs
        ctx.plan, ctx.x_shape, ctx.x_dtype, ctx.w_dtype = plan, x.shape, x.dtype, w.dtype
        ctx.observed = g_port is not None
        # A known scale spares the backward an amax; it is the right one only where the operand is the same.
        same = shared(right(plan.recipe, "output"), right(plan.recipe, "grad_input"))
        if not (plan.weight_is_codes or same):
            w_scale = None
        once = shared(left(plan.recipe, "output"), right(plan.recipe, "grad_weight"))
        if once and not plan.x_is_transposed:
            xt_data, xt_scale = x_data, x_scale
        ctx.save_for_backward(
            xt_data if plan.recipe.grad_weight else x,
            xt_scale,
            w_data if plan.weight_is_codes else w,
            w_scale,
            g_scale,
        )

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        static = (ctx.plan, ctx.x_shape, ctx.x_dtype, ctx.w_dtype, ctx.observed)
        grad_x, grad_w, g_amax = _Pullback.apply(*static, g, *ctx.saved_tensors)
        no_codes, g_amax = (None, None), g_amax if ctx.observed else None
        return None, grad_x, *no_codes, *no_codes, grad_w, *no_codes, None, g_amax


class _Pullback(torch.autograd.Function):
    """The backward as a primitive: torch.func runs backwards with create_graph, and would record it."""

    @staticmethod
    def forward(
        plan: _Plan,
        x_shape: torch.Size,
        x_dtype: torch.dtype,
        w_dtype: torch.dtype,
        observed: bool,
        g: Tensor,
        x_saved: Tensor,
        x_scale: Any,
        w_saved: Tensor,
        w_scale: Any,
        g_scale: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        recipe, g_split = plan.recipe, SPLIT[plan.form]["g"]
        to_input, to_weight = recipe.grad_input, recipe.grad_weight
        g_amax = formats.amax(g).float() if observed else g.new_zeros((), dtype=torch.float32)

        # In row form g travels as codes if codes are all that the products need.
        gather_codes = plan.form == "row" and to_input is not None and to_weight is not None
        lead = g.shape[:-1]
        g = g.flatten(0, -2)
        if plan.form == "row" and not gather_codes:
            g, g_split = sequence.gather(g, lead, plan.group), ""
        uses = [("grad_input", left(recipe, "grad_input")), ("grad_weight", left(recipe, "grad_weight"))]
        todo = jobs(g, "g", g_split, uses, g_scale, both=not gather_codes)
        n_g = len(todo)
        if to_input is not None and not plan.weight_is_codes:
            todo += jobs(w_saved, "w", SPLIT[plan.form]["w"], [("grad_input", to_input.right)], w_scale)
        codes = cast_all(todo, plan.group)
        g_codes = codes[:n_g]
        if gather_codes:
            g_codes = [Codes(*sequence.gather_codes(c.data, c.scale, lead, plan.group)) for c in g_codes]

        if to_input is None:
            grad_x = g @ w_saved.to(g.dtype)
        else:
            if plan.weight_is_codes:
                w_codes_t = Codes(transposed_after(w_saved, g), w_scale.t())
            else:
                w_codes_t = codes[n_g].t()
            grad_x = _product(to_input, g_codes[0], w_codes_t, x_dtype)
        if to_weight is None:
            grad_w = (g.t() @ x_saved.flatten(0, -2)).to(w_dtype)
        else:
            x_codes_t = Codes(x_saved, x_scale) if plan.x_is_transposed else Codes(x_saved, x_scale).t()
            grad_w = _product(to_weight, g_codes[-1].t(), x_codes_t, w_dtype)
        return grad_x.view(x_shape), grad_w, g_amax

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError("an fp8 linear layer has no second derivative")


def _product(product: Product, a: Codes, b_t: Codes, dtype: torch.dtype) -> Tensor:
    if product.left.granularity == "block":
        return block_scaled_mm(a.data, b_t.data, a.scale, b_t.scale, dtype)
    return scaled_mm(a.data, b_t.data, a.scale, b_t.scale, dtype, product.fast_accumulation)
