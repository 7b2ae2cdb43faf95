"""Tensor-parallel fp8: the same codes as one rank, rows in their order, and what travels, counted."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ftrain.fp8 import E4M3, RECIPES, History, amax, column, row, scale_from_amax, scaled_weight
from ftrain.fp8.linear import linear
from ftrain.fp8.measure import sqnr

DYNAMIC = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def whole(dtype, b=2, s=8, k=32, n=48):
    """x, two column weights, a row weight, a gradient; outliers where only the last rank has them."""
    torch.manual_seed(0)
    x, g = torch.randn(b, s, k).to(dtype), torch.randn(b, s, k).to(dtype)
    up, gate = ((torch.randn(n, k) * k**-0.5).to(dtype) for _ in range(2))
    down = (torch.randn(k, n) * n**-0.5).to(dtype)
    up[-1, 3] *= 50
    down[3, -1] *= 50
    x[1, -1, 5] *= 20
    return x, up, gate, down, g


def mlp(x, up, gate, down, recipe, group):
    """A gated product between a column and a row layer, in float32 so that nothing but fp8 rounds."""
    a, b = column(x, [up, gate], recipe, group)
    return row((a.float() * b.float().sigmoid()).to(x.dtype), down, recipe, group)


def split(rank, n, x, up, gate, down, g):
    """One rank's parts: of tokens along the sequence, of column weights along N, of row weights along K."""
    x, down, g = (t.chunk(n, 1)[rank] for t in (x, down, g))
    up, gate = (t.chunk(n, 0)[rank] for t in (up, gate))
    return x, up, gate, down, g


def pull(recipe, group, x, up, gate, down, g):
    y, vjp = torch.func.vjp(lambda *t: mlp(*t, recipe, group), x, up, gate, down)
    return y, *vjp(g)


def _against_one_rank(rank, name, dtype):
    n, tensors = dist.get_world_size(), whole(dtype)
    y, *grads = pull(RECIPES[name], None, *tensors)
    wanted = split(rank, n, *grads, y)
    y, *grads = pull(RECIPES[name], dist.group.WORLD, *split(rank, n, *tensors))
    return [float(sqnr(a, b)) for a, b in zip(wanted, (*grads, y), strict=True)]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", DYNAMIC + ["none"])
def test_ranks_agree_with_one_rank(ranks, n, name):
    """Sums of n partial sums are the only difference: codes are the same. dB; 100 is 1e-5, inf the same bits.

    torchao's row-scaled products round each partial sum to bfloat16, whatever the output's dtype: 45 dB.
    """
    exact = name in ("tensorwise", "none")
    for noise in ranks(n, _against_one_rank, name, torch.float32):
        assert min(noise) > (100 if exact else 45)
    for noise in ranks(n, _against_one_rank, name, torch.bfloat16):
        assert min(noise) > 40


def _weight_gradients_to_the_bit(rank, name):
    """Of a column layer: weight gradients contract over gathered tokens, and no sum is over ranks."""
    n = dist.get_world_size()
    x, up, gate, _, _ = whole(torch.float32)
    g = torch.randn(*x.shape[:2], up.shape[0], generator=torch.Generator().manual_seed(1))
    _, vjp = torch.func.vjp(lambda u, v: linear(x, [u, v], RECIPES[name]), up, gate)
    wanted = [t.chunk(n, 0)[rank] for t in vjp((g, g))]
    mine, local = x.chunk(n, 1)[rank], g.chunk(n, -1)[rank].contiguous()
    y, vjp = torch.func.vjp(
        lambda u, v: column(mine, [u, v], RECIPES[name], dist.group.WORLD),
        up.chunk(n, 0)[rank],
        gate.chunk(n, 0)[rank],
    )
    outputs = linear(x, [up, gate], RECIPES[name])
    same = [torch.equal(a, b.chunk(n, -1)[rank]) for a, b in zip(y, outputs, strict=True)]
    return same + [torch.equal(a, b) for a, b in zip(vjp((local, local)), wanted, strict=True)]


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_column_layer_is_one_rank_to_the_bit(ranks, name):
    for same in ranks(2, _weight_gradients_to_the_bit, name):
        assert same == [True, True, True, True]


def _nan(rank, where):
    x, up, gate, down, g = whole(torch.bfloat16)
    {"x": x, "up": up, "down": down, "g": g}[where].view(-1)[0] = float("inf")  # on rank 0 only
    got = pull(RECIPES["tensorwise"], dist.group.WORLD, *split(rank, dist.get_world_size(), x, up, gate, down, g))
    return [bool(t.isfinite().all()) for t in got]


@pytest.mark.parametrize("where", ["x", "up", "down", "g"])
def test_what_is_not_finite_on_one_rank_is_seen_on_all(ranks, where):
    for finite in ranks(2, _nan, where):
        assert not all(finite)


class Wire(TorchDispatchMode):
    """The functional collectives that run: (name, dtype, elements sent)."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("_c10d_functional::")
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            self.sent.append((name, args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


def _what_travels(rank, name):
    tensors = [t.requires_grad_() for t in split(rank, dist.get_world_size(), *whole(torch.bfloat16))]
    group, recipe = dist.group.WORLD, RECIPES[name]
    x, up, gate, down, g = tensors
    operands = []
    for w in (up, gate, down):
        scale = scale_from_amax(torch.tensor(1.0), E4M3)
        operands.append(scaled_weight(w, scale, E4M3, w.dtype) if name == "tensorwise" else w)
    with Wire() as wire:
        a, b = column(x, operands[:2], recipe, group)
        forward_column, wire.sent = wire.sent, []
        y = row(a + b, operands[2], recipe, group)
        forward_row, wire.sent = wire.sent, []
        torch.autograd.grad(y, [x, up, gate, down], g)
    return [[(n, str(t), s) for n, t, s in sent] for sent in (forward_column, forward_row, wire.sent)]


def test_codes_travel_as_bytes_once_for_all_weights(ranks):
    tokens, k = 2 * 4, 32  # of one of two ranks
    maximum = ("all_reduce", "torch.float32", 2)  # an amax and its NaN flag
    gathered = ("all_gather_into_tensor", "torch.uint8", tokens * k)
    summed = ("reduce_scatter_tensor", "torch.bfloat16", 2 * tokens * k)
    forward_column, forward_row, backward = ranks(2, _what_travels, "tensorwise")[0]
    assert forward_column == [maximum, gathered]
    assert forward_row == [maximum, summed]
    # The row layer's gradient travels as codes; each column weight's gradient has an amax; x's is summed.
    assert backward == [maximum, gathered, maximum, maximum, summed]


def test_what_must_stay_in_high_precision_travels_so(ranks):
    forward_column, _, backward = ranks(2, _what_travels, "rowwise_with_gw_hp")[0]
    assert [sent[:2] for sent in forward_column if "gather" in sent[0]] == [
        ("all_gather_into_tensor", "torch.bfloat16")
    ]
    assert ("all_gather_into_tensor", "torch.bfloat16") in [sent[:2] for sent in backward]


def _histories(rank):
    n, group = dist.get_world_size(), dist.group.WORLD
    x, up, _, _, _ = whole(torch.float32)
    g = torch.randn(*x.shape[:2], up.shape[0], generator=torch.Generator().manual_seed(1))
    x, up, g = x.chunk(n, 1)[rank], up.chunk(n, 0)[rank], g.chunk(n, -1)[rank]
    weight = scaled_weight(up, torch.tensor(4.0), E4M3, up.dtype)
    ports = torch.zeros(()), torch.zeros(())

    def layer(x_port, g_port):
        histories = {"x_history": History(torch.tensor(2.0), x_port)}
        histories["g_histories"] = [History(torch.tensor(8.0), g_port)]
        return column(x, [weight], RECIPES["delayed"], group, **histories)

    with Wire() as wire:
        y, vjp = torch.func.vjp(layer, *ports)
        seen = vjp((g,))
    maxima = [sent for sent in wire.sent if sent[0] == "all_reduce"]
    return [s.item() for s in seen], [amax(x).item(), amax(g).item()], len(maxima), y[0].shape[1]


def test_histories_need_no_collective_of_their_own(ranks):
    for seen, wanted, maxima, length in ranks(2, _histories):
        assert seen == wanted and maxima == 0 and length == 8


def _uneven(rank):
    x, _, _, down, _ = whole(torch.float32, s=6)
    with pytest.raises(ValueError, match="its sequence, 6, must be a multiple of the 4 ranks"):
        row(torch.randn(2, 6, 12), down.chunk(4, 1)[rank], RECIPES["tensorwise"], dist.group.WORLD)
    return True


def test_a_sequence_that_cannot_be_scattered_is_an_error(ranks):
    assert all(ranks(4, _uneven))


def _compiled(rank, name):
    n, group, recipe = dist.get_world_size(), dist.group.WORLD, RECIPES[name]
    *primals, g = split(rank, n, *whole(torch.float32))
    wanted = pull(recipe, group, *primals, g)
    leaves = [t.clone().requires_grad_() for t in primals]
    y = torch.compile(mlp, fullgraph=True, backend="aot_eager")(*leaves, recipe, group)
    got = (y, *torch.autograd.grad(y, leaves, g))
    return [torch.equal(a, b) for a, b in zip(got, wanted, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", DYNAMIC)
def test_compiled_gives_the_bits_of_eager(ranks, name):
    for same in ranks(2, _compiled, name):
        assert all(same)
