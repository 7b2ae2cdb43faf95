"""A backward that is a primitive of its own.

torch.func differentiates through every backward: the body of one, in the open, would be recorded, and its graph would
keep all that it touches alive. Inside a primitive nothing is recorded.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def without_derivative(what: str, fn: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor | None) -> tuple:
    """`fn(*tensors)`, a tuple of tensors, as one primitive: the backward of `what`, which has no second derivative.

    To differentiate what it returns raises RuntimeError. fn: given plain tensors, whatever transforms are at work.
    """
    return _WithoutDerivative.apply(what, fn, *tensors)


class _WithoutDerivative(torch.autograd.Function):
    @staticmethod
    def forward(what: str, fn: Callable, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return fn(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.what = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise RuntimeError(f"{ctx.what} is differentiable once: it has no second derivative")
