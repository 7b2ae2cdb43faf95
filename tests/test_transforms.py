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


def test_accumulate_sums_in_the_first_gradients_buffers():
    batches = [{"g": torch.full((2,), float(i))} for i in range(4)]
    first = batches[0]["g"]
    total, values = accumulate(lambda batch: (batch, len(batch)), batches, add)
    assert total["g"] is first and total["g"].tolist() == [6.0, 6.0] and values == [1] * 4


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
