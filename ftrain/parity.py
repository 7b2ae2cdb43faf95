"""Does a recipe compute what it should? One batch through it, and through a plain reference, side by side."""

from typing import Any

import torch

from ftrain import tree
from ftrain.optim import Optimizer
from ftrain.run import Run
from ftrain.step import TrainState, make_global_norm, make_train_step

Tree = Any


def gradients(run: Run, state: TrainState, batch: dict[str, torch.Tensor]) -> tuple[Tree, dict[str, Any]]:
    """The gradient of the mean token loss, laid out as the parameters, not clipped; and the step's metrics.

    It is what a step of this run computes, on its micro-batches and ranks; nothing is updated. Collective.
    """
    step = make_train_step(
        run.model.loss,
        _keeps_gradients(make_global_norm(run.mesh, run.plans)),
        mesh=run.mesh,
        plans=run.plans,
        micro_batches=run.micro_batches,
    )
    new, metrics = step(state._replace(opt_state=state.params), batch)
    return new.opt_state, metrics


def _keeps_gradients(norm) -> Optimizer:
    """An optimizer that changes no parameter: its state is the gradient it was given."""

    def update(grads, state, params):
        return tree.map(torch.zeros_like, params), grads

    def apply(grads, state, params, *, scale, norm, donate):
        return params, tree.map(lambda grad: grad * scale, grads)

    return Optimizer(lambda params: params, update, norm=norm, apply=apply)
