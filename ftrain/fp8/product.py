"""One weight's three products as a primitive: what is multiplied, what is kept for the backward, what comes out of it.

Letters: T tokens, K inputs, N outputs. `linear.py` makes the codes that the forward multiplies.
"""

from __future__ import annotations

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
from .matmul import block_scaled_mm, scaled_mm
from .recipes import SPLIT, Product, Recipe, left, right


class Plan(NamedTuple):
    """What is static in a call: the recipe, the form that the layer is split in, the ranks that split it."""

    recipe: Recipe
    form: str
    group: Group


class Operands(NamedTuple):
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

    plan: Plan
    weight_is_codes: bool  # it came as a Scaled
    x_is_transposed: bool  # the saved codes of x are
    x_shape: torch.Size
    x_dtype: torch.dtype
    w_dtype: torch.dtype
    observed: bool  # whether g's amax is asked for


@torch.compiler.allow_in_graph  # see linear.py
class WeightProduct(torch.autograd.Function):
    """`apply(plan, weight_is_codes, x_is_transposed, *Operands)`: the output (..., N), in row form reduce-scattered."""

    @staticmethod
    def forward(plan: Plan, weight_is_codes: bool, x_is_transposed: bool, *tensors: Tensor | None) -> Tensor:
        of, product = Operands(*tensors), plan.recipe.output
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
        of, recipe = Operands(*tensors), plan.recipe
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
        return None, None, None, *Operands(x=grad_x, w=grad_w, g_port=g_port)


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


def _g_travels_as_codes(plan: Plan) -> bool:
    """In row form, if codes are all that the products need."""
    return plan.form == "row" and plan.recipe.grad_input is not None and plan.recipe.grad_weight is not None


def _known(data: Tensor | None, scale: Tensor | None) -> Codes:
    assert data is not None and scale is not None, "a product in fp8 without the codes of an operand"
    return Codes(data, scale)


def _multiply(product: Product, a: Codes, b_t: Codes, dtype: torch.dtype) -> Tensor:
    if product.left.granularity == "block":
        return block_scaled_mm(a.data, b_t.data, a.scale, b_t.scale, dtype)
    return scaled_mm(a.data, b_t.data, a.scale, b_t.scale, dtype, product.fast_accumulation)
