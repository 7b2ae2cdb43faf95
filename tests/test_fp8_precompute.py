"""Precomputed scales: those of the whole weight, whatever the shards, with one all-reduce for everything."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ftrain.collectives import all_reduce_max
from ftrain.fp8 import E4M3, RECIPES, amax, cast, scale_from_amax, wire_operand
from ftrain.fp8.precompute import cast_shards, precompute_scales, weight_amaxes

WIRE = wire_operand(RECIPES["tensorwise"])


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precomputed_is_inline_to_the_bit(dtype):
    weights = whole(dtype)
    scales = precompute_scales(weights, WIRE)
    for path, w in weights.items():
        assert scales[path].dtype == torch.float32 and scales[path].ndim == 0
        assert torch.equal(scales[path], scale_from_amax(amax(w), E4M3))
    codes = cast_shards(weights, scales, WIRE)
    assert torch.equal(codes["b"].view(torch.uint8), cast(weights["b"], scales["b"], E4M3).view(torch.uint8))


def test_empty_shards_add_nothing_and_no_weights_are_fine():
    assert weight_amaxes([torch.empty(0, 16), torch.ones(2, 2)]).tolist() == [0.0, 1.0]
    assert weight_amaxes([]).shape == (0,)
    assert precompute_scales({}, WIRE) == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_has_scale_nan(bad):
    weights = whole()
    weights["a"][3, 1] = bad
    scales = precompute_scales(weights, WIRE)
    assert scales["a"].isnan() and scales["b"].isfinite()


class CountedMax:
    """all_reduce_max over the world, counting its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return all_reduce_max(x, dist.group.WORLD)


def _scales_and_codes(rank: int, bad: bool):
    reduce, n = CountedMax(), dist.get_world_size()
    shards = {path: shard(w, n, rank) for path, w in whole().items()}
    if bad and rank == n - 1:
        shards["b"] = shards["b"].clone().fill_(float("nan"))
    scales = precompute_scales(shards, WIRE, reduce)
    codes = cast_shards(shards, scales, WIRE)
    assert reduce.calls == 1
    return (
        {path: scale.numpy() for path, scale in scales.items()},
        {path: c.view(torch.uint8).numpy() for path, c in codes.items()},
    )


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks_agree_with_one_rank_to_the_bit(ranks, n):
    weights = whole()
    scales = precompute_scales(weights, WIRE)
    codes = cast_shards(weights, scales, WIRE)
    got = ranks(n, _scales_and_codes, False)
    for path in weights:
        for their_scales, _ in got:
            assert their_scales[path] == scales[path].numpy()
        gathered = np.concatenate([their_codes[path] for _, their_codes in got])
        assert np.array_equal(gathered, codes[path].view(torch.uint8).numpy())


def test_nan_on_one_rank_reaches_all_ranks(ranks):
    for scales, _ in ranks(3, _scales_and_codes, True):
        assert np.isnan(scales["b"]) and np.isfinite(scales["a"])
