"""The post transform: scales and codes of whole weights, whatever the shards, with one all-reduce for everything."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from steps import CountedMax

from ftrain.fp8 import E4M3, RECIPES, amax, cast, make_post, parse, scale_from_amax
from ftrain.fp8.post import weight_amaxes
from ftrain.param import ONES, Param
from ftrain.step import TrainState


def whole(dtype=torch.float32):
    """Weights whose rows do not divide, with the largest value in the last row; the last has a single row."""
    torch.manual_seed(0)
    weights = {
        "b": torch.randn(5, 16),
        "a": torch.randn(7, 3),
        "c": torch.randn(1, 4),
        "z": torch.zeros(4, 4),
    }
    for w in weights.values():
        w[-1, -1] *= 30
    return {path: w.to(dtype) for path, w in weights.items()}


def shard(w: torch.Tensor, n: int, rank: int) -> torch.Tensor:
    rows = -(-w.shape[0] // n)
    return w[rank * rows : (rank + 1) * rows]


def post_of(paths, reduce=None, recipe=RECIPES["tensorwise"]):
    declared = {path: Param((1, 1), ("mlp", "embed"), ONES) for path in paths}
    options = {"precompute": True, "cache": True, "codes_travel": True, "wire_dtype": torch.bfloat16}
    return make_post(recipe, declared, lambda path: True, all_reduce_max=reduce, **options)


def derived(shards, reduce=None, recipe=RECIPES["tensorwise"]):
    """(scale, codes as bytes) of every weight, from one rank's shards."""
    weights = post_of(shards, reduce, recipe)(TrainState(0, shards, None)).fp8_state.weights
    return {path: (weight.scale, weight.codes.view(torch.uint8)) for path, weight in weights.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precomputed_is_inline_to_the_bit(dtype):
    weights = whole(dtype)
    for path, (scale, codes) in derived(weights).items():
        assert scale.dtype == torch.float32 and scale.ndim == 0
        assert torch.equal(scale, scale_from_amax(amax(weights[path]), E4M3))
        assert torch.equal(codes, cast(weights[path], scale, E4M3).view(torch.uint8))


def test_empty_shards_add_nothing_and_without_weights_there_is_no_transform():
    assert weight_amaxes([torch.empty(0, 16), torch.ones(2, 2)]).tolist() == [0.0, 1.0]
    assert post_of([]) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_has_scale_nan(bad):
    weights = whole()
    weights["a"][3, 1] = bad
    found = derived(weights)
    assert found["a"][0].isnan() and found["b"][0].isfinite()


def _scales_and_codes(rank: int, bad: bool):
    reduce, n = CountedMax(), dist.get_world_size()
    shards = {path: shard(w, n, rank) for path, w in whole().items()}
    if bad and rank == n - 1:
        shards["b"] = shards["b"].clone().fill_(float("nan"))
    found = derived(shards, reduce)
    assert reduce.calls == 1
    return {path: (scale.numpy(), codes.numpy()) for path, (scale, codes) in found.items()}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks_agree_with_one_rank_to_the_bit(ranks, n):
    results = ranks(n, _scales_and_codes, False)
    for path, (scale, codes) in derived(whole()).items():
        assert all(result[path][0] == scale.numpy() for result in results)
        assert np.array_equal(np.concatenate([result[path][1] for result in results]), codes.numpy())


def test_nan_on_one_rank_reaches_all_ranks(ranks):
    for found in ranks(3, _scales_and_codes, True):
        assert np.isnan(found["b"][0]) and np.isfinite(found["a"][0])


def _scales_with_histories_of_inputs_alone(rank: int):
    inputs = "e4m3 history"
    products = {"output": {"x": inputs, "w": "e4m3"}, "grad_weight": {"g": "e5m2", "x": inputs}}
    recipe = parse({"base": "tensorwise", **products})
    shards = {path: shard(w, dist.get_world_size(), rank) for path, w in whole().items()}
    return {path: scale.numpy() for path, (scale, _) in derived(shards, CountedMax(), recipe).items()}


def test_a_weights_scale_is_of_the_whole_weight_also_where_only_inputs_have_histories(ranks):
    wanted = {path: scale.numpy() for path, (scale, _) in derived(whole()).items()}
    assert ranks(2, _scales_with_histories_of_inputs_alone) == [wanted] * 2
