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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftrain import collectives
from ftrain.collectives import Group
from ftrain.kernels.transpose import transposed_after
from ftrain.primitives import without_derivative

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
    return _apply(x, weights, _Plan(recipe, "local", None), x_history, g_histories)


def column(
    x: Tensor,
    weights: Sequence[Tensor | Scaled],
    recipe: Recipe,
    group: Group,
    *,
    x_history: History | None = None,
    g_histories: Sequence[History] | None = None,
) -> tuple[Tensor, ...]:
    """Column-parallel `linear`: x (B, S/n, K) and weights (N/n, K) to outputs (B, S, N/n).

    x's codes are gathered along S, once for all weights; the gradient of x is reduce-scattered along S. Where
    a product needs x in high precision, x is gathered so. n is the group's size; a group of None is `linear`.
    """
    return _apply(x, weights, _Plan(recipe, "column", group), x_history, g_histories)


def row(
    x: Tensor,
    weight: Tensor | Scaled,
    recipe: Recipe,
    group: Group,
    *,
    x_history: History | None = None,
    g_history: History | None = None,
) -> Tensor:
    """Row-parallel `linear`: x (B, S, K/n) and a weight (N, K/n) to the output (B, S/n, N).

    The output is reduce-scattered along S; the codes of its gradient are gathered along S. A group of None is
    `linear`.
    """
    g_histories = None if g_history is None else [g_history]
    return _apply(x, [weight], _Plan(recipe, "row", group), x_history, g_histories)[0]


def scaled_weight(w: Tensor, scale: Tensor, dtype: torch.dtype, grad_dtype: torch.dtype) -> Scaled:
    """w cast to fp8 with a known scale: a `Scaled` whose gradient, of grad_dtype, is handed back to w."""
    return Scaled(formats.cast(w.detach(), scale, dtype), scale, formats.port_of(w, grad_dtype))


class _Plan(NamedTuple):
    """What is static in a call: the recipe, the form that the layer is split in, the ranks that split it."""

    recipe: Recipe
    form: str
    group: Group


def _apply(
    x: Tensor,
    weights: Sequence[Tensor | Scaled],
    plan: _Plan,
    x_history: History | None,
    g_histories: Sequence[History] | None,
) -> tuple[Tensor, ...]:
    if plan.group is None or plan.group.size() == 1:
        plan = _Plan(plan.recipe, "local", None)
    _refuse(x, weights, plan, x_history, g_histories)
    if x_history is not None:
        x = _Observe.apply(x, x_history.port, formats.amax(x.detach()).float())
    main = source = x  # what takes the gradient, what is cast
    if _x_travels_as_codes(plan):
        main = sequence.gathered_port(x, plan.group)
    elif plan.form == "column":
        main = source = collectives.all_gather(x, x.ndim - 2, plan.group)
    x_codes, w_codes = _cast(source, weights, plan, None if x_history is None else x_history.scale)

    first, second = left(plan.recipe, "output"), right(plan.recipe, "grad_weight")
    none: tuple[Any, Any] = (None, None)
    x_data, x_scale = x_codes[0][:2] if first else none
    xt_data, xt_scale = none
    x_is_transposed = False
    if not shared(first, second):
        xt_data, xt_scale = x_codes[-1][:2] if x_codes and second else none
    elif x_codes[0].data_t is not None:  # grad_weight takes the codes of output: passed again only where they differ
        xt_data, xt_scale, x_is_transposed = x_codes[0].data_t, x_scale, True

    outputs, casts = [], iter(w_codes)
    mains = _FanOut.apply(main, len(weights)) if len(weights) > 1 else (main,)
    for i, w in enumerate(weights):
        if isinstance(w, Scaled):
            w_main, w_data, w_scale = w.port, w.data, w.scale
        else:
            w_main, (w_data, w_scale) = w, next(casts)[:2] if first else none
        g_scale, g_port = none if g_histories is None else g_histories[i]
        operands = _Operands(
            x=mains[i],
            x_data=x_data,
            x_scale=x_scale,
            xt_data=xt_data,
            xt_scale=xt_scale,
            w=w_main,
            w_data=w_data,
            w_scale=w_scale,
            g_scale=g_scale,
            g_port=g_port,
        )
        outputs.append(_Product.apply(plan, isinstance(w, Scaled), x_is_transposed, *operands))
    return tuple(outputs)


def _x_travels_as_codes(plan: _Plan) -> bool:
    """In column form, if codes are all that the products need; x's gradient then comes to a port."""
    return plan.form == "column" and left(plan.recipe, "output") is not None and plan.recipe.grad_weight is not None


def _g_travels_as_codes(plan: _Plan) -> bool:
    """In row form, if codes are all that the products need."""
    return plan.form == "row" and plan.recipe.grad_input is not None and plan.recipe.grad_weight is not None


def _cast(
    x: Tensor, weights: Sequence[Tensor | Scaled], plan: _Plan, x_scale: Tensor | None
) -> tuple[list[Codes], list[Codes]]:
    """x's codes for output (the first) and grad_weight (the last), gathered; and those of each weight that has none."""
    recipe, form = plan.recipe, plan.form
    travels = _x_travels_as_codes(plan)
    second = right(recipe, "grad_weight") if torch.is_grad_enabled() else None
    split = "" if form == "column" and not travels else SPLIT[form]["x"]  # "": x was gathered before
    uses = [("output", left(recipe, "output")), ("grad_weight", second)]
    todo = jobs(x.detach().flatten(0, -2), "x", split, uses, x_scale, both=not travels)
    n_x = len(todo)
    for w in weights:
        if not isinstance(w, Scaled):
            todo += jobs(w.detach(), "w", SPLIT[form]["w"], [("output", right(recipe, "output"))])
    codes = cast_all(todo, plan.group)
    x_codes = codes[:n_x]
    if travels:
        x_codes = [Codes(*sequence.gather_codes(c.data, c.scale, x.shape[:-1], plan.group)) for c in x_codes]
    return x_codes, codes[n_x:]


def _refuse(
    x: Tensor,
    weights: Sequence[Tensor | Scaled],
    plan: _Plan,
    x_history: History | None,
    g_histories: Sequence[History] | None,
) -> None:
    recipe, form, group = plan
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


class _Operands(NamedTuple):
    """The tensors of one product's primitive, and in its backward their gradients. None: not there.

    x (..., K) and w (N, K) take the gradients; they are multiplied where a product is in high precision, their codes
    elsewhere. xt: x's codes for grad_weight, where these are not the output's. g_port takes the amax of g.
    """

    x: Tensor | None = None
    x_data: Tensor | None = None
    x_scale: Tensor | None = None
    xt_data: Tensor | None = None
    xt_scale: Tensor | None = None
    w: Tensor | None = None
    w_data: Tensor | None = None
    w_scale: Tensor | None = None
    g_scale: Tensor | None = None
    g_port: Tensor | None = None


class _Saved(NamedTuple):
    """What is kept for the backward: x's codes for grad_weight (or x, where that is in high precision), and the
    weight's codes if it came as codes, else the weight itself: that one is somebody's parameter and costs nothing to
    keep, its codes would."""

    x: Tensor
    x_scale: Tensor | None
    w: Tensor
    w_scale: Tensor | None
    g_scale: Tensor | None


class _Backward(NamedTuple):
    """What is static in a backward."""

    plan: _Plan
    weight_is_codes: bool  # it came as a Scaled
    x_is_transposed: bool  # the saved codes of x are
    x_shape: torch.Size
    x_dtype: torch.dtype
    w_dtype: torch.dtype
    observed: bool  # whether g's amax is asked for


@torch.compiler.allow_in_graph
class _Product(torch.autograd.Function):
    """One weight's three products."""

    @staticmethod
    def forward(plan: _Plan, weight_is_codes: bool, x_is_transposed: bool, *tensors: Tensor | None) -> Tensor:
        of, product = _Operands(*tensors), plan.recipe.output
        x, w = of.x, of.w
        assert x is not None and w is not None
        if product is None:
            y = x.flatten(0, -2) @ w.t().to(x.dtype)
        else:
            y = _multiply(product, _known(of.x_data, of.x_scale), _known(of.w_data, of.w_scale), x.dtype)
        y = y.view(*x.shape[:-1], y.shape[-1])
        if plan.form == "row":
            y = collectives.reduce_scatter(y, y.ndim - 2, plan.group)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        plan, weight_is_codes, x_is_transposed, *tensors = inputs
        of, recipe = _Operands(*tensors), plan.recipe
        assert of.x is not None and of.w is not None
        ctx.static = _Backward(
            plan, weight_is_codes, x_is_transposed, of.x.shape, of.x.dtype, of.w.dtype, of.g_port is not None
        )
        xt_data, xt_scale, w_scale = of.xt_data, of.xt_scale, of.w_scale
        if shared(left(recipe, "output"), right(recipe, "grad_weight")) and not x_is_transposed:
            xt_data, xt_scale = of.x_data, of.x_scale
        # A known scale spares the backward an amax; it is the right one only where the operand is the same.
        if not (weight_is_codes or shared(right(recipe, "output"), right(recipe, "grad_input"))):
            w_scale = None
        x, w = xt_data if recipe.grad_weight else of.x, of.w_data if weight_is_codes else of.w
        ctx.save_for_backward(x, xt_scale, w, w_scale, of.g_scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        pull_back = partial(_pull_back, ctx.static)
        grad_x, grad_w, g_amax = without_derivative("an fp8 linear layer", pull_back, g, *ctx.saved_tensors)
        g_port = g_amax if ctx.static.observed else None
        return None, None, None, *_Operands(x=grad_x, w=grad_w, g_port=g_port)


def _pull_back(static: _Backward, g: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and w, and the amax of g (zero where it is not asked for)."""
    saved, plan = _Saved(*tensors), static.plan
    to_input, to_weight = plan.recipe.grad_input, plan.recipe.grad_weight
    g_amax = formats.amax(g).float() if static.observed else g.new_zeros((), dtype=torch.float32)
    g, g_codes, w_codes = _cast_backward(static, g, saved)
    if to_input is None:
        grad_x = g @ saved.w.to(g.dtype)
    else:
        if static.weight_is_codes:
            assert saved.w_scale is not None
            w_codes_t = Codes(transposed_after(saved.w, g), saved.w_scale.t())
        else:
            w_codes_t = w_codes[0].t()
        grad_x = _multiply(to_input, g_codes[0], w_codes_t, static.x_dtype)
    if to_weight is None:
        grad_w = (g.t() @ saved.x.flatten(0, -2)).to(static.w_dtype)
    else:
        x_codes = _known(saved.x, saved.x_scale)
        grad_w = _multiply(
            to_weight, g_codes[-1].t(), x_codes if static.x_is_transposed else x_codes.t(), static.w_dtype
        )
    return grad_x.view(static.x_shape), grad_w, g_amax


def _cast_backward(static: _Backward, g: Tensor, saved: _Saved) -> tuple[Tensor, list[Codes], list[Codes]]:
    """g as a matrix, gathered if it is needed whole; its codes for grad_input (the first) and grad_weight (the last),
    gathered; and the weight's codes for grad_input, if there were none."""
    plan, recipe = static.plan, static.plan.recipe
    travels = _g_travels_as_codes(plan)
    lead, split = g.shape[:-1], SPLIT[plan.form]["g"]
    g = g.flatten(0, -2)
    if plan.form == "row" and not travels:
        g, split = sequence.gather(g, lead, plan.group), ""
    uses = [("grad_input", left(recipe, "grad_input")), ("grad_weight", left(recipe, "grad_weight"))]
    todo = jobs(g, "g", split, uses, saved.g_scale, both=not travels)
    n_g = len(todo)
    if recipe.grad_input is not None and not static.weight_is_codes:
        todo += jobs(saved.w, "w", SPLIT[plan.form]["w"], [("grad_input", recipe.grad_input.right)], saved.w_scale)
    codes = cast_all(todo, plan.group)
    g_codes = codes[:n_g]
    if travels:
        g_codes = [Codes(*sequence.gather_codes(c.data, c.scale, lead, plan.group)) for c in g_codes]
    return g, g_codes, codes[n_g:]


def _known(data: Tensor | None, scale: Tensor | None) -> Codes:
    assert data is not None and scale is not None, "a product in fp8 without the codes of an operand"
    return Codes(data, scale)


def _multiply(product: Product, a: Codes, b_t: Codes, dtype: torch.dtype) -> Tensor:
    if product.left.granularity == "block":
        return block_scaled_mm(a.data, b_t.data, a.scale, b_t.scale, dtype)
    return scaled_mm(a.data, b_t.data, a.scale, b_t.scale, dtype, product.fast_accumulation)
