"""The law of layouts: the same seed and batch give the same loss and gradients on every mesh."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from ftrain import Run, load_recipe, optim, tree
from ftrain.execution import Execution
from ftrain.launch import World
from ftrain.models import family, llama
from ftrain.nn import IGNORE
from ftrain.param import Param
from ftrain.sharding import MeshShape, full, initialize, make_mesh
from ftrain.step import init_state, make_global_norm, make_train_step

LAYOUTS = {
    "shard 2": MeshShape(shard=2),
    "shard 3": MeshShape(shard=3),
    "shard 4": MeshShape(shard=4),
    "replicate 2 x shard 2": MeshShape(replicate=2, shard=2),
    "tensor 2": MeshShape(tensor=2),
    "tensor 4": MeshShape(tensor=4),
    "shard 2 x tensor 2": MeshShape(shard=2, tensor=2),
}
ONE_RANK = MeshShape()

# Two query heads to a key head, and sizes that divide by 2 and 4; then sizes that mostly do not.
EVEN = llama.Config(vocab_size=64, dim=16, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=4, ffn_dim=48)
ODD = llama.Config(vocab_size=60, dim=18, n_layers=3, n_heads=4, n_kv_heads=4, head_dim=6, ffn_dim=44)
TIED = replace(ODD, tie_embeddings=True)

SEQUENCES, SEQ_LEN = 12, 16  # 12 divides by 1, 2, 3 and 4


def batch_of(cfg, documents=False):
    """Sequences of which different numbers of targets count, so that ranks weigh differently."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, cfg.vocab_size, (SEQUENCES, SEQ_LEN + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(SEQUENCES):
        targets[row, [1, 16, 7, 3, 0][row % 5] :] = IGNORE
    batch = {"tokens": tokens[:, :-1], "targets": targets}
    if documents:
        starts = torch.rand(SEQUENCES, SEQ_LEN, generator=generator) < 0.2
        batch["segments"] = starts.long().cumsum(1)
    return batch


def gradient_as_parameters(norm):
    """An optimizer whose new parameters are the gradient: what a step makes of it can then be looked at."""

    def apply(grads, state, params, *, scale, norm, donate):
        return tree.map(lambda grad: grad * scale, grads), state

    return optim.Optimizer(lambda params: (), None, norm=norm, apply=apply)


mesh_of = cache(make_mesh)  # process groups are made once a layout


def one_step(rank, shape, cfg, options, rows=SEQUENCES, documents=False, dtype=torch.float32):
    """(initial parameters, metrics, gradients) of a step on the mesh `shape`, as whole arrays and numbers.

    rows: sequences in a micro-batch, at most.
    """
    mesh = mesh_of(shape)
    execution = Execution(mesh=mesh, **options)
    model = family(type(cfg).__module__.rpartition(".")[2])
    declared = tree.map(lambda p: Param(p.shape, p.axes, p.init, dtype), model.abstract(cfg))
    plans = execution.plans(declared)
    optimizer = gradient_as_parameters(make_global_norm(mesh, plans))
    state = init_state(initialize(declared, plans, mesh, seed=7), optimizer)
    mine, each = shape.data_index(mesh.rank), SEQUENCES // shape.data
    batch = {key: value[mine * each : (mine + 1) * each] for key, value in batch_of(cfg, documents).items()}
    micro_batches = each // math.gcd(each, rows)
    step = make_train_step(
        model.make_model(cfg, execution).loss, optimizer, mesh=mesh, plans=plans, micro_batches=micro_batches
    )
    after, metrics = step(state, batch)
    numbers = {name: metrics[name].item() for name in ("loss", "grad_norm", "tokens")}
    params, grads = (
        {path: leaf.float().numpy() if dtype != torch.float64 else leaf.numpy() for path, leaf in named}
        for named in map(tree.named_leaves, (full(state.params), full(after.params)))
    )
    return params, numbers, grads


@cache
def on_one_rank(cfg, documents=False, dtype=torch.float32):
    """What everything is compared with: no remat, no accumulation, not compiled."""
    wide = {} if dtype == torch.float32 else {"compute_dtype": dtype, "reduce_dtype": dtype}
    return one_step(0, ONE_RANK, cfg, wide, documents=documents, dtype=dtype)


def check_same(got, expected, tolerance=1e-5):
    for name in ("loss", "grad_norm"):
        assert got[1][name] == pytest.approx(expected[1][name], rel=tolerance, abs=0), name
    assert got[1]["tokens"] == expected[1]["tokens"] == 2 * 27 + 17
    assert got[2].keys() == expected[2].keys()
    for path, want in expected[2].items():
        assert np.abs(want).max() > 0, f"the gradient of {path} is all zero: the test proves nothing"
        error = np.linalg.norm(got[2][path] - want) / np.linalg.norm(want)
        assert error <= tolerance, f"{path}: {error}"


VARIANTS = {
    "even": (EVEN, {}, {}),
    "uneven": (ODD, {}, {}),
    "tied": (TIED, {}, {}),
    "remat": (ODD, {"remat": "full"}, {}),
    "some remat": (EVEN, {"remat": 0.5, "reshard_after_forward": False}, {}),
    "kept weights": (ODD, {"reshard_after_forward": False}, {}),
    "accumulation": (ODD, {}, {"rows": 3}),
    "loss in 3 chunks": (TIED, {"loss_chunks": 3}, {}),
    "documents": (EVEN, {}, {"documents": True}),
    "all at once": (TIED, {"remat": 0.5, "loss_chunks": 3}, {"rows": 1, "documents": True}),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_computes_the_gradients_of_one_rank(ranks, name, variant):
    shape, (cfg, options, others) = LAYOUTS[name], VARIANTS[variant]
    expected = on_one_rank(cfg, others.get("documents", False))
    results = ranks(shape.size, one_step, shape, cfg, options, *arguments(**others))
    for result in results:
        assert result[1] == results[0][1], "ranks do not report the same numbers"
        assert all((result[0][path] == expected[0][path]).all() for path in expected[0]), "initial values differ"
        check_same(result, expected)


def arguments(rows=SEQUENCES, documents=False, dtype=torch.float32):
    return rows, documents, dtype


@pytest.mark.parametrize("name", LAYOUTS)
def test_in_fp64_nothing_but_rounding_is_left(ranks, name):
    shape, wide = LAYOUTS[name], {"compute_dtype": torch.float64, "reduce_dtype": torch.float64}
    expected = on_one_rank(ODD, dtype=torch.float64)
    for _, _, grads in ranks(shape.size, one_step, shape, ODD, wide, *arguments(rows=3, dtype=torch.float64)):
        for path, want in expected[2].items():
            assert np.linalg.norm(grads[path] - want) <= 1e-12 * np.linalg.norm(want), path


@pytest.mark.parametrize("name", ["shard 2", "tensor 2", "shard 2 x tensor 2"])
def test_compiled_layouts_compute_the_gradients_of_one_rank(ranks, name):
    # One sequence a micro-batch: layouts that split only the data then share what is compiled.
    shape, options = LAYOUTS[name], {"compile": True, "remat": 0.5}
    for result in ranks(shape.size, one_step, shape, EVEN, options, *arguments(rows=1)):
        check_same(result, on_one_rank(EVEN))


@pytest.mark.parametrize("name", ["shard 2", "shard 3", "shard 4", "replicate 2 x shard 2"])
def test_gradients_reduced_in_bf16_are_sums_not_averages(ranks, name):
    shape = LAYOUTS[name]
    for result in ranks(shape.size, one_step, shape, ODD, {"reduce_dtype": torch.bfloat16}):
        check_same(result, on_one_rank(ODD), tolerance=1e-2)


@pytest.mark.parametrize("name", ["shard 3", "replicate 2 x shard 2", "shard 2 x tensor 2"])
def test_weights_may_travel_in_their_own_dtype_or_that_of_compute(ranks, name):
    shape, low = LAYOUTS[name], {"compute_dtype": torch.bfloat16}
    travels_low = ranks(shape.size, one_step, shape, ODD, low)
    travels_high = ranks(shape.size, one_step, shape, ODD, low | {"wire_dtype": torch.float32})
    for a, b in zip(travels_low, travels_high, strict=True):
        assert a[1] == b[1]
        assert all((a[2][path] == b[2][path]).all() for path in a[2])
        assert a[1]["loss"] == pytest.approx(on_one_rank(ODD)[1]["loss"], rel=1e-2)


@pytest.mark.slow
def test_all_three_axes_at_once(ranks):
    shape = MeshShape(replicate=2, shard=2, tensor=2)
    for cfg in (ODD, TIED):
        for result in ranks(shape.size, one_step, shape, cfg, {"remat": 0.5}, 1):
            check_same(result, on_one_rank(cfg))


# --- whole runs, from a recipe -----------------------------------------------------------------------------

BASE = (
    *(f"model.{key}={getattr(ODD, key)}" for key in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads")),
    *(f"model.{key}={getattr(ODD, key)}" for key in ("head_dim", "ffn_dim")),
    "data.source=synthetic",
    f"data.seq_len={SEQ_LEN}",
    f"data.global_batch_size={SEQUENCES}",
    "precision.compute=float32",
    "optimizer.clip_norm=0.1",
    "schedule.warmup_steps=2",
    "train.steps=6",
    "train.compile=false",
    "validation.sequences=7",
)


# Plain descent shows a wrong factor of the gradient, or of the clipped one; AdamW hides it. The rates are
# large: three steps change the loss by a percent and more.
RULES = {
    "sgd": ("optimizer.name=sgd", "optimizer.lr=30"),
    "adamw": ("optimizer.name=adamw", "optimizer.lr=3e-2"),
}


def run_steps(rank, shape, overrides, steps=3):
    """[loss, grad norm, tokens, lr] of each step of a recipe, then what validation says."""
    parallel = [f"parallel.{axis}={getattr(shape, axis)}" for axis in ("replicate", "shard", "tensor")]
    each = SEQUENCES // shape.data
    rows = f"train.micro_batch_size={each // (2 if each % 2 == 0 else 3)}"
    recipe = load_recipe("debug", (*BASE, *parallel, rows, *overrides))
    run = Run(recipe, World(rank, shape.size), "cpu")
    state, seen = run.init(), []
    for step in range(steps):
        state, metrics = run.step(state, run.batch(step))
        seen.append([float(metrics[name]) for name in ("loss", "grad_norm", "tokens", "lr")])
    return seen, run.evaluate(state)


@cache
def run_on_one_rank(rule):
    return run_steps(0, ONE_RANK, RULES[rule])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_is_the_same_run_on_every_layout(ranks, name, rule):
    shape, (expected, (total, count)) = LAYOUTS[name], run_on_one_rank(rule)
    results = ranks(shape.size, run_steps, shape, RULES[rule])
    for seen, validation in results:
        assert (seen, validation) == results[0], "ranks do not report the same numbers"
        assert np.allclose(seen, expected, rtol=1e-5, atol=0), (seen, expected)
        assert all(row[1] > 0.1 for row in seen), "clipping is not active: the test proves less"
        assert validation[1] == count == 7 * SEQ_LEN
        assert validation[0] == pytest.approx(total, rel=1e-5)
