"""The fold: what it keeps, what it runs again, and that neither changes a gradient."""

import gc
import weakref

import pytest
import torch
from torch.func import grad_and_value

from ftrain import tree
from ftrain.execution import Execution
from ftrain.fold import fold, kept_layers, sum_over_chunks
from ftrain.fsdp import Layer
from ftrain.param import Param, normal
from ftrain.sharding import Mesh, MeshShape, initialize, make_mesh, to_local

DIM, HIDDEN, N = 8, 24, 4


def block(weights, x):
    return x + torch.nn.functional.silu(x @ weights["up"].t()) @ weights["down"].t()


def declared():
    layer = {
        "up": Param((HIDDEN, DIM), ("mlp", "embed"), normal(0.3)),
        "down": Param((DIM, HIDDEN), ("embed", "mlp"), normal(0.2)),
    }
    return {"layers": [dict(layer) for _ in range(N)]}


RULES = ((), Execution().rules[1])


def setup(mesh=None, **options):
    execution = Execution(mesh=mesh or Mesh(), rules=RULES, **options)
    abstract = declared()
    plans = execution.plans(abstract)
    paths = tree.map_named(lambda path, _: path, abstract)
    gathers = [execution.gather(*(t["layers"][i] for t in (abstract, plans, paths))) for i in range(N)]
    return gathers, to_local(initialize(abstract, plans, execution.mesh, 0))


def inputs():
    return torch.randn(6, DIM, generator=torch.Generator().manual_seed(1))


def gradients(remat="none", fn=block, through=fold, mesh=None, **options):
    gathers, params = setup(mesh, **options)

    def loss(params, x):
        return through(fn, [Layer(p) for p in params["layers"]], x, gathers=gathers, remat=remat).square().sum()

    (d_params, d_x), value = grad_and_value(loss, argnums=(0, 1))(params, inputs())
    return [value, d_x, *tree.leaves(d_params)]


def plain_fold(fn, layers, x, gathers, remat):
    for layer in layers:
        x = fn(layer.params, x)
    return x


def test_the_fold_has_the_gradients_of_a_plain_loop():
    for a, b in zip(gradients(), gradients(through=plain_fold), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_where_there_is_nothing_to_schedule_autograd_alone_has_the_same_bits():
    gathers, params = setup()
    leaves = [leaf.requires_grad_() for leaf in (inputs(), *tree.leaves(params))]
    value = fold(block, [Layer(p) for p in params["layers"]], leaves[0], gathers=gathers).square().sum()
    assert "Fold" not in str(value.grad_fn.next_functions[0][0].next_functions), "a primitive, with nothing to schedule"
    for a, b in zip([value, *torch.autograd.grad(value, leaves)], gradients(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("remat", ["full", 0.0, 0.25, 0.6, 1.0])
def test_remat_changes_no_bit_of_the_gradients(remat):
    for a, b in zip(gradients(remat), gradients("none"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("remat,again", [("none", 0), ("full", N), (0.5, N - 2), (1.0, 0)])
def test_a_layer_runs_again_in_the_backward_only_where_it_kept_nothing(remat, again):
    calls = []

    def counted(weights, x):
        calls.append(1)
        return block(weights, x)

    gradients(remat, counted)
    assert len(calls) == N + again


def test_a_budget_counts_whole_layers():
    assert [kept_layers(b, 4) for b in ("none", "full", 0.24, 0.25, 0.5, 0.99, 1.0)] == [4, 0, 0, 1, 2, 3, 4]


def test_plain_autograd_gives_what_torch_func_gives():
    gathers, params = setup()
    leaves = [leaf.requires_grad_() for leaf in tree.leaves(params)]
    x = inputs().requires_grad_()
    y = fold(block, [Layer(p) for p in params["layers"]], x, gathers=gathers)
    got = torch.autograd.grad(y.square().sum(), [x, *leaves])
    for a, b in zip(got, gradients()[1:], strict=True):
        assert torch.equal(a, b)


def test_no_grad_keeps_nothing():
    gathers, params = setup()
    with torch.no_grad():
        y = fold(block, [Layer(p) for p in params["layers"]], inputs(), gathers=gathers)
    assert y.grad_fn is None


def test_a_second_derivative_is_refused():
    gathers, params = setup()
    x = inputs().requires_grad_()
    y = fold(block, [Layer(p) for p in params["layers"]], x, gathers=gathers, remat="full").square().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        torch.autograd.grad(first.sum(), x)


def test_residuals_die_with_the_call():
    gathers, params = setup()
    alive = []

    def watched(weights, x):
        h = x @ weights["up"].t()
        alive.append(weakref.ref(h))
        return x + torch.nn.functional.silu(h) @ weights["down"].t()

    def loss(params):
        return fold(watched, [Layer(p) for p in params["layers"]], inputs(), gathers=gathers).square().sum()

    gc.disable()  # reference counts alone must do: a cycle would hold a layer's activations until the collector runs
    try:
        grad_and_value(loss)(params)
        assert sum(ref() is not None for ref in alive) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_sum_over_chunks_has_the_gradients_of_the_whole(chunks):
    gathers, params = setup()
    layer, target = params["layers"][0], torch.arange(6.0).view(6, 1)

    def fn(weights, x, t):
        return ((x @ weights["up"].t()).tanh().sum(-1, keepdim=True) - t).square().sum() + weights[
            "down"
        ].square().sum()

    def chunked(layer, x):
        pieces, consts = x.chunk(chunks), [(t,) for t in target.chunk(chunks)]
        return 3.0 * sum_over_chunks(fn, Layer(layer), pieces, consts, gather=gathers[0])

    def whole(layer, x):
        return 3.0 * (fn(layer, x, target) + (chunks - 1) * layer["down"].square().sum())

    got, value = grad_and_value(chunked, argnums=(0, 1))(layer, inputs())
    expected, expected_value = grad_and_value(whole, argnums=(0, 1))(layer, inputs())
    assert torch.allclose(value, expected_value)
    for a, b in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def live_weights(rank, options, remat):
    """(gathered weights alive after the forward, most alive at once) of a training step on this rank."""
    from ftrain import fsdp

    mesh = make_mesh(MeshShape(shard=torch.distributed.get_world_size()))
    gathers, params = setup(mesh, **options)
    refs, peak, after = [], 0, None
    wait = fsdp.Arriving.wait

    def alive():
        return sum(ref() is not None for ref in refs)

    def counted(self):
        nonlocal peak
        weights = wait(self)
        refs.extend(weakref.ref(w) for w in tree.leaves(weights))
        peak = max(peak, alive())
        return weights

    def loss(params, x):
        nonlocal after
        y = fold(block, [Layer(p) for p in params["layers"]], x, gathers=gathers, remat=remat)
        after = alive()
        return y.square().sum()

    fsdp.Arriving.wait = counted
    try:
        grad_and_value(loss)(params, inputs())
    finally:
        fsdp.Arriving.wait = wait
    return after, peak, alive()


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gathered_weights_live_only_while_their_layer_runs(ranks, remat):
    per_layer = 2
    for after, peak, end in ranks(2, live_weights, {}, remat):
        assert after == 0, "gathered weights are kept between forward and backward"
        assert peak <= 2 * per_layer
        assert end == 0


def test_without_reshard_gathered_weights_are_kept_for_the_backward(ranks):
    for after, peak, end in ranks(2, live_weights, {"reshard_after_forward": False}, "none"):
        assert (after, peak, end) == (2 * N, 2 * N, 0)


def sharded_gradients(rank, options):
    mesh = make_mesh(MeshShape(shard=torch.distributed.get_world_size()))
    gathers, params = setup(mesh, **options)
    x = inputs()

    def loss(params):
        return fold(block, [Layer(p) for p in params["layers"]], x, gathers=gathers).square().sum()

    grads, _ = grad_and_value(loss)(params)
    return [g.numpy() for g in tree.leaves(grads)]


@pytest.mark.parametrize("n", [2, 3])
def test_rows_that_do_not_divide_come_back_in_order(ranks, n):
    whole = [g.numpy() for g in gradients()[2:]]
    results = ranks(n, sharded_gradients, {})
    for i, expected in enumerate(whole):
        got = torch.cat([torch.from_numpy(result[i]) for result in results])
        assert got.shape == expected.shape
        assert torch.allclose(got, n * torch.from_numpy(expected), rtol=1e-5)  # every rank had the same input
