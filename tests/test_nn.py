"""The functions a Llama is made of, each against its formula."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import grad, grad_and_value

from ftrain.collectives import all_reduce
from ftrain.nn import (
    IGNORE,
    attention,
    cross_entropy,
    embed,
    rms_norm,
    rope,
    rope_frequencies,
    rope_table,
    same_document,
    swiglu,
)


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- norm and rotary embedding -----------------------------------------------------------------------------


def test_rms_norm_is_its_formula():
    x, weight = drawn(2, 3, 8), drawn(8, seed=1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    assert torch.allclose(rms_norm(x, weight, 1e-3), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(rms_norm(torch.zeros(1, 8), weight, 1e-5), torch.zeros(1, 8))


def test_rms_norm_of_bf16_is_computed_in_fp32():
    x, weight = drawn(64, 256, dtype=torch.bfloat16), drawn(256, seed=1, dtype=torch.bfloat16)
    got, exact = rms_norm(x, weight, 1e-5), rms_norm(x.double(), weight.double(), 1e-5)
    assert got.dtype == torch.bfloat16
    assert ((got.double() - exact).abs() <= 2**-8 * exact.abs()).all()  # half a bf16 step: rounded once, at the end


SCALING = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_rope_frequencies_are_llamas():
    assert rope_frequencies(8, 10000.0).tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)
    scaled = rope_frequencies(8, 10000.0, SCALING)
    assert scaled.tolist() == pytest.approx([1.0, 0.013042256, 0.00125, 0.000125], rel=1e-6)
    assert scaled.dtype == torch.float32


def test_long_wavelengths_are_stretched_and_short_ones_kept():
    scaling = SCALING | {"original_max_position_embeddings": 8192}
    plain, scaled = rope_frequencies(128, 500000.0), rope_frequencies(128, 500000.0, scaling)
    turns = 8192 * plain.double() / (2 * math.pi)
    assert torch.equal(scaled[turns > 4.001], plain[turns > 4.001])
    assert torch.allclose(scaled[turns < 0.999], plain[turns < 0.999] / 8, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


def test_rope_turns_pairs_by_their_positions_angle():
    table = rope_table(5, torch.tensor([1.0, 0.25]))
    x = drawn(1, 5, 1, 4)
    pairs = torch.complex(x[..., :2], x[..., 2:])
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.25])).view(1, 5, 1, 2)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    assert torch.allclose(rope(x, table), torch.cat([turned.real, turned.imag], -1), atol=1e-6)
    assert torch.equal(rope(x, table)[:, 0], x[:, 0]), "position 0 turns"
    assert rope(x.bfloat16(), table).dtype == torch.bfloat16


def test_products_of_rotated_vectors_depend_on_their_distance_only():
    table = rope_table(32, rope_frequencies(8, 10000.0))
    q, k = (drawn(8, seed=s).expand(1, 32, 1, 8) for s in (1, 2))
    products = rope(q, table)[0, :, 0] @ rope(k, table)[0, :, 0].T
    for distance in (0, 3, 17):
        diagonal = products.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)


# --- attention ---------------------------------------------------------------------------------------------


def heads(n_heads, n_kv_heads, seq=12, dtype=torch.float32):
    return (
        drawn(2, n_heads, seq, 4, dtype=dtype),
        drawn(2, n_kv_heads, seq, 4, seed=1, dtype=dtype),
        drawn(2, n_kv_heads, seq, 4, seed=2, dtype=dtype),
    )


def softmax_attention(q, k, v, allowed):
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v


def test_attention_is_its_formula():
    q, k, v = heads(3, 3)
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    assert torch.allclose(attention(q, k, v), softmax_attention(q, k, v, causal), atol=1e-6)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_grouped_heads_are_repeated_heads_in_values_and_gradients(n_kv_heads):
    q, k, v = heads(4, n_kv_heads)

    def grouped(q, k, v):
        return attention(q, k, v)

    def repeated(q, k, v):
        return attention(q, *(t.repeat_interleave(4 // n_kv_heads, dim=1) for t in (k, v)))

    def total(fn):
        return grad_and_value(lambda args: (fn(*args) * drawn(2, 4, 12, 4, seed=3)).sum())((q, k, v))

    assert torch.allclose(grouped(q, k, v), repeated(q, k, v), atol=1e-6)
    for got, expected in zip(total(grouped)[0], total(repeated)[0], strict=True):
        assert torch.allclose(got, expected, atol=1e-5)


def test_a_document_attends_to_itself_only():
    q, k, v = heads(4, 2)
    segments = torch.tensor([[0] * 5 + [1] * 7, [3] * 12])
    together = attention(q, k, v, same_document(segments))
    for rows in (slice(0, 5), slice(5, 12)):
        alone = attention(*(t[:1, :, rows] for t in (q, k, v)))
        assert torch.allclose(together[:1, :, rows], alone, atol=1e-6)
    assert torch.allclose(together[1:], attention(q[1:], k[1:], v[1:]), atol=1e-6)


def test_swiglu_is_its_formula():
    gate, up = drawn(3, 5), drawn(3, 5, seed=1)
    assert torch.allclose(swiglu(gate, up), gate / (1 + (-gate).exp()) * up, atol=1e-6)


# --- the loss ----------------------------------------------------------------------------------------------

N, V, D = 10, 12, 6


def loss_inputs(dtype=torch.float32):
    targets = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(5))
    targets[[2, 7]] = IGNORE
    return drawn(N, V, dtype=dtype) * 3, targets


def test_cross_entropy_is_a_sum_over_targets_that_count():
    logits, targets = loss_inputs()
    counted = targets != IGNORE
    expected = -logits.log_softmax(-1)[counted, targets[counted]].sum()
    assert torch.allclose(cross_entropy(logits, targets), expected, rtol=1e-6)
    got = grad(cross_entropy)(logits, targets)
    assert torch.allclose(got[counted], logits[counted].softmax(-1) - F.one_hot(targets[counted], V), atol=1e-6)
    assert (got[~counted] == 0).all()


def test_cross_entropy_of_low_precision_logits_is_fp32_and_of_fp64_stays_fp64():
    logits, targets = loss_inputs()
    assert cross_entropy(logits.bfloat16(), targets).dtype == torch.float32
    assert torch.equal(cross_entropy(logits.bfloat16(), targets), cross_entropy(logits.bfloat16().float(), targets))
    assert cross_entropy(logits.double(), targets).dtype == torch.float64


def test_nothing_counted_is_a_loss_and_a_gradient_of_zero():
    logits, targets = loss_inputs()
    got, value = grad_and_value(cross_entropy)(logits, torch.full_like(targets, IGNORE))
    assert value == 0 and (got == 0).all()


def split_loss(rank, dtype):
    """Cross entropy and embedding with the vocabulary split over the ranks, against the whole."""
    n, group = dist.get_world_size(), dist.group.WORLD
    logits, targets = loss_inputs(dtype)
    logits[3] += 1e4  # a maximum far from the others, on some rank: only its subtraction keeps exp finite
    mine = logits.chunk(n, dim=1)[rank].contiguous()
    for chosen in (targets, torch.full_like(targets, IGNORE)):
        got, value = grad_and_value(cross_entropy)(mine, chosen, group)
        expected, whole = grad_and_value(cross_entropy)(logits, chosen)
        assert value.dtype == whole.dtype and torch.allclose(value, whole, rtol=1e-6), (value, whole)
        assert torch.allclose(got, expected.chunk(n, dim=1)[rank], atol=1e-6), (got, expected)
    weight, tokens = drawn(V, D, dtype=dtype), torch.arange(-V, V).remainder(V).view(2, V)
    slope = drawn(2, V, D, seed=4, dtype=dtype)

    def split(rows):
        return (all_reduce(embed(rows, tokens, group), group) * slope).sum()

    got, value = grad_and_value(split)(weight.chunk(n)[rank].contiguous())
    expected, whole = grad_and_value(lambda w: (F.embedding(tokens, w) * slope).sum())(weight)
    assert torch.equal(value, whole), (value, whole)
    assert torch.equal(got, expected.chunk(n)[rank]), (got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_a_split_vocabulary_has_the_loss_and_gradients_of_the_whole(ranks, n, dtype):
    ranks(n, split_loss, dtype)
