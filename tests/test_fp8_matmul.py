"""The scaled product: against float64, padded and not, empty, and where scales are not finite."""

import pytest
import torch

from ftrain.fp8 import E4M3, E5M2, amax, cast, dequantise, scale_from_amax, scaled_mm
from ftrain.fp8.matmul import padding
from ftrain.fp8.measure import sqnr

SHAPES = [(16, 32, 48), (24, 40, 56), (5, 7, 3), (1, 16, 1), (33, 1128, 24)]


def operand(rows, columns, dtype=E4M3, dim=None):
    x = torch.randn(rows, columns)
    scale = scale_from_amax(amax(x, dim), dtype)
    return x, cast(x, scale, dtype), scale


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dims", [(None, None), (1, 1), (1, None), (None, 1)])
@pytest.mark.parametrize("fast_accum", [False, True])
def test_it_is_the_product_of_the_dequantised_operands(shape, dims, fast_accum):
    torch.manual_seed(0)
    m, k, n = shape
    _, a, scale_a = operand(m, k, dim=dims[0])
    _, b, scale_b = operand(n, k, dim=dims[1])
    out = scaled_mm(a, b, scale_a, scale_b, torch.bfloat16, fast_accum)
    exact = dequantise(a, scale_a, torch.float64) @ dequantise(b, scale_b, torch.float64).T
    assert out.dtype == torch.bfloat16 and out.shape == (m, n)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize("a_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_padding_changes_no_bit(shape, dim, a_dtype, out_dtype):
    torch.manual_seed(0)
    m, k, n = shape
    _, a, scale_a = operand(m, k, a_dtype, dim)
    _, b, scale_b = operand(n, k, E4M3, dim)
    plain = scaled_mm(a, b, scale_a, scale_b, out_dtype, pad=False)
    padded = scaled_mm(a, b, scale_a, scale_b, out_dtype, pad=True)
    assert padded.shape == (m, n) and padded.is_contiguous()
    if out_dtype == torch.bfloat16:
        assert torch.equal(plain, padded)
    else:  # a CPU kernel may group more terms differently
        torch.testing.assert_close(plain, padded, rtol=1e-5, atol=1e-5)


def test_padding_is_what_reaches_a_multiple_of_16():
    assert [padding(size) for size in (0, 1, 16, 1128, 2256, 2556, 2560)] == [0, 15, 0, 8, 0, 4, 0]


@pytest.mark.parametrize("shape", [(0, 32, 16), (16, 0, 16), (16, 32, 0), (0, 0, 0)])
@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize("pad", [False, True])
def test_empty_dimensions_give_zeros(shape, dim, pad):
    m, k, n = shape
    _, a, scale_a = operand(m, k, dim=dim)
    _, b, scale_b = operand(n, k, dim=dim)
    out = scaled_mm(a, b, scale_a, scale_b, torch.bfloat16, pad=pad)
    assert torch.equal(out, torch.zeros(m, n, dtype=torch.bfloat16))


@pytest.mark.parametrize("dim", [None, 1])
def test_a_scale_that_is_nan_makes_the_product_nan(dim):
    _, a, scale_a = operand(16, 32, dim=dim)
    _, b, scale_b = operand(16, 32, dim=dim)
    out = scaled_mm(torch.zeros_like(a), b, scale_a * float("nan"), scale_b, torch.bfloat16)
    assert out.isnan().all()


@pytest.mark.parametrize(("a_dtype", "bar"), [(E4M3, 28.0), (E5M2, 24.0)])
def test_signal_to_noise_of_a_product(a_dtype, bar):
    torch.manual_seed(0)
    x, a, scale_a = operand(128, 1024, a_dtype)
    w, b, scale_b = operand(128, 1024)
    noise = sqnr(x.double() @ w.double().T, scaled_mm(a, b, scale_a, scale_b, torch.float32))
    assert bar < noise < bar + 2
