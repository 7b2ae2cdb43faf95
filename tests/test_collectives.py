"""Collectives: each has the transpose it says, under torch.func, eager and compiled."""

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, grad_and_value

from ftrain.collectives import all_gather, all_reduce, all_reduce_max, reduce_scatter, replicated
from ftrain.transforms import jit

ROWS, WIDTH = 6, 4


def drawn(rank, *shape, seed=0, dtype=torch.float32):
    """A tensor that only this rank has, of whole numbers so that sums are exact in any order and dtype."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def everyones(n, *shape, **options):
    return [drawn(rank, *shape, **options) for rank in range(n)]


def check(got, expected, what):
    """Equal bit for bit, which `assert torch.equal` in another process would not explain."""
    assert got.dtype == expected.dtype and torch.equal(got, expected), f"{what}: {got}, expected {expected}"


def values(rank, dtype):
    n, group = dist.get_world_size(), dist.group.WORLD
    for dim in (0, 1, -1):
        whole = torch.cat(everyones(n, ROWS, WIDTH, dtype=dtype), dim)
        check(all_gather(drawn(rank, ROWS, WIDTH, dtype=dtype), dim, group), whole, f"all_gather, dim {dim}")
        wide = [n * size for size in (ROWS, WIDTH)]
        mine = sum(everyones(n, *wide, dtype=dtype)).chunk(n, dim)[rank]
        check(reduce_scatter(drawn(rank, *wide, dtype=dtype), dim, group), mine, f"reduce_scatter, dim {dim}")
    total = sum(everyones(n, ROWS, WIDTH, dtype=dtype))
    check(all_reduce(drawn(rank, ROWS, WIDTH, dtype=dtype), group), total, "all_reduce")
    check(all_reduce(drawn(rank, WIDTH, ROWS, dtype=dtype).t(), group), total_of_transposed(n, dtype), "strided")
    same = drawn(0, ROWS, dtype=dtype)
    check(replicated(same, group), same, "replicated")


def total_of_transposed(n, dtype):
    return sum(everyones(n, WIDTH, ROWS, dtype=dtype)).t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_pieces_come_in_rank_order_and_sums_are_sums(ranks, n, dtype):
    ranks(n, values, dtype)


def transposes(rank, dim):
    """<all_gather x, y> = <x, reduce_scatter y>, summed over ranks; and torch.func knows it."""
    n, group = dist.get_world_size(), dist.group.WORLD
    piece = drawn(rank, ROWS, WIDTH)
    whole = drawn(rank, *all_gather(piece, dim, group).shape, seed=1)
    left = all_reduce((all_gather(piece, dim, group) * whole).sum(), group)
    right = all_reduce((piece * reduce_scatter(whole, dim, group)).sum(), group)
    check(left, right, "the two inner products")
    got, value = grad_and_value(lambda x: (all_gather(x, dim, group) * whole).sum())(piece)
    check(got, reduce_scatter(whole, dim, group), "the gradient of all_gather")
    check(value, (all_gather(piece, dim, group) * whole).sum(), "the value beside it")
    got = grad(lambda y: (reduce_scatter(y, dim, group) * piece).sum())(whole)
    check(got, all_gather(piece, dim, group), "the gradient of reduce_scatter")
    got = grad(lambda x: (replicated(x, group) * piece).sum())(drawn(0, ROWS, WIDTH))
    check(got, sum(everyones(n, ROWS, WIDTH)), "the gradient of replicated")
    got = grad(lambda x: (all_reduce(x, group) * piece).sum())(drawn(rank, ROWS, WIDTH, seed=1))
    check(got, piece, "the gradient of all_reduce")
    # Each backward is itself a collective with a transpose: the gradient of the squared gradient.
    got = grad(lambda x: grad(lambda z: all_gather(z, dim, group).pow(3).sum())(x).sum())(piece)
    check(got, n * 6 * piece, "the second derivative")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("n", [2, 3])
def test_the_backward_of_each_is_its_partner(ranks, n, dim):
    ranks(n, transposes, dim)


def split_layer(x, gain, up, down, group):
    """Two products split over the group, rows of x split too, `gain` whole: all four collectives."""
    h = torch.tanh(all_gather(x * replicated(gain, group), 0, group) @ up.t())
    return all_reduce(reduce_scatter(h @ down.t(), 0, group).square().sum(), group).square()


def whole_layer(x, gain, up, down):
    return (torch.tanh((x * gain) @ up.t()) @ down.t()).square().sum().square()


def layer_gradients(rank, compiled):
    n, group = dist.get_world_size(), dist.group.WORLD
    fn = jit(split_layer) if compiled else split_layer
    x, gain = torch.cat(everyones(n, 2, WIDTH)) / 8, drawn(0, WIDTH, seed=3) / 8
    up, down = drawn(0, n * 2, WIDTH, seed=1) / 8, drawn(0, WIDTH, n * 2, seed=2) / 8
    mine = x.chunk(n)[rank], gain, up.chunk(n)[rank], down.chunk(n, 1)[rank].contiguous()
    if compiled:  # as the fold does: the forward is compiled, its backward is pulled outside
        leaves = [t.clone().requires_grad_() for t in mine]
        value = fn(*leaves, group)
        grads = torch.autograd.grad(value, leaves)
    else:
        grads, value = grad_and_value(lambda args: fn(*args, group))(mine)
    (dx, d_gain, d_up, d_down), total = grad_and_value(lambda args: whole_layer(*args))((x, gain, up, down))
    expected = dx.chunk(n)[rank], d_gain, d_up.chunk(n)[rank], d_down.chunk(n, 1)[rank]
    assert torch.allclose(value, total, rtol=1e-5), (value, total)
    for name, got, part in zip(("x", "gain", "up", "down"), grads, expected, strict=True):
        assert torch.allclose(got, part, rtol=1e-4, atol=1e-6), f"{name}: {got}, expected {part}"


@pytest.mark.parametrize("n,compiled", [(2, False), (3, False), (2, True)])
def test_a_layer_split_over_ranks_has_the_gradients_of_the_whole_layer(ranks, n, compiled):
    ranks(n, layer_gradients, compiled)


def maxima(rank, dtype):
    group, nan, inf = dist.group.WORLD, float("nan"), float("inf")
    rows = torch.tensor([[1.0, -3.0, -inf, inf, nan, 5.0, -inf], [2.0, -4.0, -inf, 0.0, 7.0, nan, nan]], dtype=dtype)
    expected = torch.tensor([2.0, -3.0, -inf, inf, nan, nan, nan], dtype=dtype)
    got = all_reduce_max(rows[rank], group)
    assert got.dtype == dtype and torch.equal(got.nan_to_num(99.0), expected.nan_to_num(99.0)), f"{got}"
    got = all_reduce_max(rows[rank, 4], group)
    assert got.shape == () and got.isnan(), f"{got}"
    assert not all_reduce_max(rows[rank].clone().requires_grad_(), group).requires_grad, "it is differentiable"
    compiled = jit(all_reduce_max)(rows[rank], group)
    assert torch.equal(compiled.nan_to_num(99.0), expected.nan_to_num(99.0)), f"compiled: {compiled}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_maximum_with_nan_on_any_rank_is_nan_on_all(ranks, dtype):
    ranks(2, maxima, dtype)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: all_gather(x, 0, None),
        lambda x: reduce_scatter(x, 0, None),
        lambda x: all_reduce(x, None),
        lambda x: replicated(x, None),
    ],
)
def test_a_rank_alone_moves_nothing(fn):
    x = torch.ones(3)
    assert fn(x) is x
    assert torch.equal(all_reduce_max(x, None), x)
