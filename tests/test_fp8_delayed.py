"""Delayed scaling: histories go in and come out, recover from overflow, and forget what is not finite."""

import pytest
import torch
from steps import CountedMax

from ftrain.fp8 import E4M3, E5M2, RECIPES, scale_from_amax
from ftrain.fp8.delayed import LENGTH, Triple, init_state, scales, update

RECIPE = RECIPES["delayed"]


def triple(x, w=1.0, g=1.0):
    return Triple(*(torch.tensor(float(v)) for v in (x, w, g)))


def after(*xs, path="a"):
    state = init_state([path])
    for x in xs:
        state = update(state, {path: triple(x)})
    return state


def test_a_fresh_state_has_scale_one():
    state = init_state(["a", "b"])
    assert all(s == 1.0 for s in scales(state, RECIPE)["b"])
    assert init_state([]) == {} and scales({}, RECIPE) == {} and update({}, {}) == {}


def test_the_scale_is_that_of_the_largest_amax_in_the_history():
    state = update(init_state(["a"]), {"a": triple(3.0, 2.0, 1e-3)})
    state = update(state, {"a": triple(1.0, 4.0, 1e-4)})
    found = scales(state, RECIPE)["a"]
    assert torch.equal(found.x, scale_from_amax(torch.tensor(3.0), E4M3))
    assert torch.equal(found.w, scale_from_amax(torch.tensor(4.0), E4M3))
    assert torch.equal(found.g, scale_from_amax(torch.tensor(1e-3), E5M2))
    assert state["a"][0, :3].tolist() == [1.0, 3.0, 0.0]


def test_an_overflow_enters_the_history_and_leaves_it_after_its_length():
    state = after(1.0, 100.0)
    assert scales(state, RECIPE)["a"].x == scale_from_amax(torch.tensor(100.0), E4M3)
    for _ in range(LENGTH - 1):
        state = update(state, {"a": triple(1.0)})
    assert scales(state, RECIPE)["a"].x == scale_from_amax(torch.tensor(100.0), E4M3)
    state = update(state, {"a": triple(1.0)})
    assert scales(state, RECIPE)["a"].x == scale_from_amax(torch.tensor(1.0), E4M3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_enter(bad):
    state = after(2.0, 1.0, bad)
    assert state["a"][0, :4].tolist() == [1.0, 1.0, 2.0, 0.0]
    assert scales(state, RECIPE)["a"].x.isfinite()


def test_update_changes_nothing_in_place():
    state = after(1.0)
    before = state["a"].clone()
    update(state, {"a": triple(5.0)})
    assert torch.equal(state["a"], before)


def test_other_paths_are_an_error():
    with pytest.raises(ValueError, match="layers.1.wq"):
        update(init_state(["layers.0.wq"]), {"layers.0.wq": triple(1), "layers.1.wq": triple(1)})


def _update(rank: int):
    reduce = CountedMax()
    state = init_state(["a", "b"])
    state = update(state, {"a": triple(rank + 1.0), "b": triple(float("nan") if rank else 5.0)}, reduce)
    assert reduce.calls == 1
    return {path: history.numpy() for path, history in state.items()}


def test_ranks_agree_with_one_all_reduce(ranks):
    for state in ranks(2, _update):
        assert state["a"][0, 0] == 2.0
        assert state["b"][0, 0] == 0.0  # not finite on one rank: on none does it enter
