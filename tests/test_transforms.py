"""Function transforms: compiling, pulling back, accumulating."""

import gc
import weakref
from functools import partial

import pytest
import torch

from ftrain import tree
from ftrain.transforms import accumulate, add, grad_and_value, jit, linearize, maximum, why_no_jit


def scaled(x, factor):
    return x * factor


def test_a_session_may_compile_more_functions_than_torch_counts_recompilations():
    with torch._dynamo.config.patch(recompile_limit=2):
        for factor in (2.0, 3.0, 4.0, 5.0):
            assert jit(partial(scaled, factor=factor))(torch.ones(3)).tolist() == [factor] * 3


def test_this_machine_can_compile_or_says_why_not(monkeypatch):
    assert why_no_jit(torch.device("cpu")) is None
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "g++" in why_no_jit(torch.device("cpu"))
    assert why_no_jit(torch.device("cuda")) is None


# --- linearize ---------------------------------------------------------------------------------------------


def layer(weights, x, scale):
    return torch.tanh(x @ weights["w"].t() + weights["b"]) * scale


def weights_and_input():
    generator = torch.Generator().manual_seed(0)
    w, b, x = (torch.randn(*shape, generator=generator) for shape in ((3, 4), (3,), (5, 4)))
    return {"w": w, "b": b, "unused": torch.ones(2)}, x


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_pullback_gives_the_gradients_of_the_call(compiled):
    weights, x = weights_and_input()
    y, pullback = linearize(jit(layer) if compiled else layer, weights, x, torch.tensor(2.0))
    d_weights, d_x = pullback(weights, torch.ones_like(y))
    assert not y.requires_grad and d_weights["unused"] is None
    leaves = [t.clone().requires_grad_() for t in (weights["w"], weights["b"], x)]
    expected = layer({"w": leaves[0], "b": leaves[1]}, leaves[2], 2.0)
    assert torch.allclose(y, expected)
    grads = torch.autograd.grad(expected.sum(), leaves)
    for got, want in zip((d_weights["w"], d_weights["b"], d_x), grads, strict=True):
        assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_pullback_keeps_no_weights_alive(compiled):
    weights, x = weights_and_input()
    again = tree.map(torch.clone, weights)
    alive = weakref.ref(weights["w"].untyped_storage())
    y, pullback = linearize(jit(layer) if compiled else layer, weights, x, torch.tensor(2.0))
    del weights
    gc.collect()
    assert alive() is None, "the weights are kept between forward and backward"
    assert pullback.needs_weights
    _, d_x = pullback(again, torch.ones_like(y))
    assert d_x.shape == x.shape


# --- gradients ---------------------------------------------------------------------------------------------


def test_gradients_pair_with_parameters_by_name_in_any_order():
    def loss(params, x):
        return (params["b"] * 3 + params["a"] * x).sum(), params["a"] * 2

    for params in ({"a": torch.ones(2), "b": torch.ones(2)}, {"b": torch.ones(2), "a": torch.ones(2)}):
        grads, (value, aux) = grad_and_value(loss)(params, 5.0)
        assert grads["a"].tolist() == [5.0, 5.0] and grads["b"].tolist() == [3.0, 3.0]
        assert value == 16 and aux.tolist() == [2.0, 2.0] and not aux.requires_grad


def squares(params, batch):
    """Autograd hands a and b one gradient tensor; c has a gradient of stride 0, in bfloat16; d has none."""
    loss = ((params["a"] + params["b"]) * batch).square().sum() + params["c"].bfloat16().sum()
    return loss, batch.sum()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_accumulation_is_the_sum_and_its_gradient_the_gradient_of_the_sum(n):
    params = {name: torch.full((3,), float(i)) for i, name in enumerate("abcd")}
    batches = list(torch.arange(3.0 * n).view(n, 3))

    def of_the_whole(params):
        return 5 * sum(squares(params, batch)[0] for batch in batches), params["a"]

    def accumulated(params):
        total, values = accumulate(squares, batches, add)(params)
        return 5 * total, values

    grads, (total, values) = grad_and_value(accumulated)(params)
    expected, (whole, _) = grad_and_value(of_the_whole)(params)
    assert total == whole and [aux.tolist() for _, aux in values] == [batch.sum() for batch in batches]
    assert [value.tolist() for value, _ in values] == [squares(params, batch)[0] for batch in batches]
    assert not any(leaf.requires_grad for leaf in tree.leaves((grads, total, values)))
    for name in params:
        assert torch.equal(grads[name].float(), expected[name].float()), name


def test_a_batch_is_pulled_back_before_the_next_one_runs():
    order = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, i):
            order.append(f"forward {i}")
            ctx.i = i
            return w.sum()

        @staticmethod
        def backward(ctx, grad):
            order.append(f"backward {ctx.i}")
            return grad.expand(2), None

    grad_and_value(accumulate(lambda w, i: (Seen.apply(w, i), w), range(3), add))(torch.ones(2))
    assert order == [f"{half} {i}" for i in range(3) for half in ("forward", "backward")]


def test_an_accumulation_has_no_second_derivative():
    def gradient(w):
        return grad_and_value(accumulate(lambda w, by: ((w**3 * by).sum(), w), [1.0, 2.0], add))(w)[0].sum()

    with pytest.raises(RuntimeError, match="accumulate is differentiable once"):
        torch.func.grad(gradient)(torch.ones(2))


def test_a_sum_takes_over_the_first_ones_buffers():
    total = {"g": torch.full((2,), 3.0)}
    got = add(total, {"g": torch.ones(2)})
    assert got["g"] is total["g"] and got["g"].tolist() == [4.0, 4.0]
    got = add(total, {"g": torch.ones(2, dtype=torch.bfloat16)}, torch.tensor(0.5))
    assert got["g"] is total["g"] and got["g"].tolist() == [3.0, 3.0]


def test_buffers_that_leaves_share_are_not_added_to_twice():
    one = torch.ones(3)
    total = {"a": one, "b": one, "c": torch.ones(()).expand(3), "halves": list(torch.zeros(4).split(2))}
    new = {"a": one * 2, "b": one * 3, "c": one * 4, "halves": [torch.ones(2), torch.ones(2)]}
    first, second = (piece.data_ptr() for piece in total["halves"])
    got = add(total, new)
    assert [got[name].tolist() for name in "abc"] == [[3.0] * 3, [4.0] * 3, [5.0] * 3]
    assert [piece.data_ptr() for piece in got["halves"]] == [first, second], "pieces of one buffer share nothing"


def test_low_precision_gradients_are_added_in_fp32():
    low = {"g": torch.full((1,), 256.0, dtype=torch.bfloat16)}
    got = add(add(low, {"g": torch.ones(1, dtype=torch.bfloat16)}), {"g": torch.ones(1, dtype=torch.bfloat16)})
    assert got["g"].dtype == torch.float32 and got["g"].item() == 258.0


def test_a_maximum_keeps_nan():
    got = maximum({"x": torch.tensor([1.0, float("nan")])}, {"x": torch.tensor([2.0, 5.0])})
    assert got["x"][0] == 2.0 and got["x"][1].isnan()
