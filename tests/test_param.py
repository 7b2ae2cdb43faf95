"""Initial values: the same rows whoever makes them, from the seed and the path alone."""

import pytest
import torch

from ftrain.param import BLOCK_ELEMENTS, ONES, ZEROS, Init, Param, initial_rows, normal

TALL = Param((700, 1000), ("vocab", "embed"), normal(0.02))  # several blocks, the last one cut
FLAT = Param((5, 7), ("vocab", "embed"), normal(1.0))


def test_any_rows_are_those_rows_of_the_whole():
    height = BLOCK_ELEMENTS // 1000
    assert 2 * height < 700 < 3 * height, "the blocks are not where this test thinks"
    whole = initial_rows("w", TALL, seed=3)
    for start, stop in [
        (0, 1),
        (1, 5),
        (height - 1, height + 1),
        (height, 2 * height),
        (100, 700),
        (699, 700),
    ]:
        assert torch.equal(initial_rows("w", TALL, 3, start, stop), whole[start:stop]), (start, stop)


@pytest.mark.parametrize("start,stop", [(0, 0), (5, 5), (5, 4), (3, 3)])
def test_a_rank_without_rows_makes_none(start, stop):
    assert initial_rows("w", FLAT, 0, start, stop).shape == (0, 7)


def test_values_depend_on_the_seed_and_the_path_and_nothing_else():
    torch.manual_seed(1)
    first = initial_rows("layers.0.wq", FLAT, seed=0)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1)), "it drew from the global generator"
    assert torch.equal(first, initial_rows("layers.0.wq", FLAT, seed=0))
    others = [initial_rows("layers.1.wq", FLAT, seed=0), initial_rows("layers.0.wq", FLAT, seed=1)]
    # Seeds and paths that would collide if they were joined without a mark between them.
    others += [initial_rows("1/w", FLAT, seed=1), initial_rows("w", FLAT, seed=11)]
    for i, other in enumerate(others):
        assert all(not torch.equal(other, x) for x in [first, *others[:i]])


def test_normal_values_have_the_spread_asked_for():
    values = initial_rows("w", TALL, seed=0)
    assert abs(values.std().item() / 0.02 - 1) < 0.01
    assert abs(values.mean().item()) < 0.02 / 100
    assert not torch.equal(values[:200], values[262:462]), "two blocks repeat each other"


def test_ones_zeros_and_dtypes():
    assert torch.equal(initial_rows("w", Param((3,), ("embed",), ONES), 0), torch.ones(3))
    assert torch.equal(initial_rows("w", Param((3, 2), ("a", "b"), ZEROS), 0, 1), torch.zeros(2, 2))
    low = Param(FLAT.shape, FLAT.axes, FLAT.init, torch.bfloat16)
    assert torch.equal(initial_rows("w", low, 0), initial_rows("w", FLAT, 0).bfloat16())


def test_declarations_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="one axis name per dim"):
        Param((2, 3), ("embed",), ONES)
    with pytest.raises(ValueError, match="layers.0.wq.*uniform"):
        initial_rows("layers.0.wq", Param((2,), ("embed",), Init("uniform")), 0)


def test_numel():
    assert Param((), (), ONES).numel == 1
    assert TALL.numel == 700_000
