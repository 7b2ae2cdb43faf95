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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftrain import collectives
from ftrain.collectives import Group

from . import formats, sequence
from .casts import Codes, cast_all, jobs, shared
from .formats import Scaled
from .product import Operands, Plan, WeightProduct
from .recipes import SPLIT, Recipe, left, operands, right


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
    return _apply(x, weights, Plan(recipe, "local", None), x_history, g_histories)


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
    return _apply(x, weights, Plan(recipe, "column", group), x_history, g_histories)


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
    return _apply(x, [weight], Plan(recipe, "row", group), x_history, g_histories)[0]


def scaled_weight(w: Tensor, scale: Tensor, dtype: torch.dtype, grad_dtype: torch.dtype) -> Scaled:
    """w cast to fp8 with a known scale: a `Scaled` whose gradient, of grad_dtype, is handed back to w."""
    return Scaled(formats.cast(w.detach(), scale, dtype), scale, formats.port_of(w, grad_dtype))


def _apply(
    x: Tensor,
    weights: Sequence[Tensor | Scaled],
    plan: Plan,
    x_history: History | None,
    g_histories: Sequence[History] | None,
) -> tuple[Tensor, ...]:
    if plan.group is None or plan.group.size() == 1:
        plan = Plan(plan.recipe, "local", None)
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
        operands = Operands(
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
        outputs.append(WeightProduct.apply(plan, isinstance(w, Scaled), x_is_transposed, *operands))
    return tuple(outputs)


def _x_travels_as_codes(plan: Plan) -> bool:
    """In column form, if codes are all that the products need; x's gradient then comes to a port."""
    return plan.form == "column" and left(plan.recipe, "output") is not None and plan.recipe.grad_weight is not None


def _cast(
    x: Tensor, weights: Sequence[Tensor | Scaled], plan: Plan, x_scale: Tensor | None
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
    plan: Plan,
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
