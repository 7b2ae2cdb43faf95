"""Whole steps on a GPU: the compiled fp8 backward again and again, and that both precisions learn."""

import pytest
import torch

import ftrain
from ftrain import tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_run(*overrides):
    return ftrain.Run(ftrain.load_recipe("debug", ("train.compile=true", *overrides)))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_compiled_fp8_step_gives_the_same_finite_bits_fifty_times(recipe):
    precompute = str(recipe == "tensorwise").lower()
    run = make_run(f"fp8.recipe={recipe}", f"fp8.precompute_scales={precompute}", "data.source=synthetic")
    start, batch, first = run.init(), run.batch(0), None
    for _ in range(50):
        state, metrics = run.step(tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, start), batch)
        got = [metrics["loss"], metrics["grad_norm"], *tree.leaves(state.params)]
        first = first or got
        for a, b in zip(got, first, strict=True):
            assert a.isfinite().all() and torch.equal(a, b)


@pytest.mark.slow
def test_the_debug_model_learns_alike_in_bf16_and_fp8():
    losses = {}
    for recipe in ("none", "tensorwise"):
        # One micro-batch: the recipe's are cut for the caches of a CPU, and a GPU would wait for the host.
        one = f"train.micro_batch_size={ftrain.load_recipe('debug').data.global_batch_size}"
        run = make_run(f"fp8.recipe={recipe}", "precision.compute=bfloat16", one)
        state, curve = run.init(), []
        for step in range(300):
            state, metrics = run.step(state, run.batch(step))
            curve.append(metrics["loss"])
        losses[recipe] = torch.stack(curve[-20:]).mean().item()
    assert losses["none"] < 2.3, losses
    assert abs(losses["tensorwise"] / losses["none"] - 1) < 0.02, losses
