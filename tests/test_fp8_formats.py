"""Scales and casts: exact codes, zeros and tiny numbers, what is not finite, and how much a cast loses."""

import math

import pytest
import torch

from ftrain.fp8 import E4M3, E5M2, MAX, amax, cast, dequantise, scale_from_amax
from ftrain.fp8.formats import port_of
from ftrain.fp8.measure import cast_loss, sqnr

BOTH = pytest.mark.parametrize("dtype", [E4M3, E5M2])


def quantise(x, dtype=E4M3, dim=None, power_of_two=False):
    scale = scale_from_amax(amax(x, dim), dtype, power_of_two)
    return cast(x, scale, dtype), scale


@BOTH
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_all_zeros_give_a_finite_scale_and_exact_zeros(dtype, dim):
    codes, scale = quantise(torch.zeros(4, 32), dtype, dim)
    assert (scale > 0).all() and scale.isfinite().all() and scale.reciprocal().isfinite().all()
    assert torch.equal(dequantise(codes, scale), torch.zeros(4, 32))


def test_a_zero_row_is_zero_and_leaves_the_others_alone():
    x = torch.randn(4, 32)
    x[2] = 0
    codes, scale = quantise(x, dim=1)
    others = [0, 1, 3]
    assert torch.equal(dequantise(codes, scale)[2], torch.zeros(32))
    assert torch.equal(codes[others].view(torch.uint8), quantise(x[others], dim=1)[0].view(torch.uint8))


@BOTH
@pytest.mark.parametrize("value", [1e-37, 1e-40, 1e-30, 1e-13, 1e30, 3e38])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_extreme_amaxes_keep_the_scale_and_its_reciprocal_finite(dtype, value, power_of_two):
    codes, scale = quantise(torch.full((16, 16), value), dtype, None, power_of_two)
    assert scale.isfinite() and scale > 0 and scale.reciprocal().isfinite()
    back = dequantise(codes, scale)
    assert back.isfinite().all()
    # Below the smallest amax everything flushes to zero; above it the value comes back.
    assert (back == 0).all() or torch.allclose(back, torch.full_like(back, value), rtol=0.07)
    assert value < 1e-12 or (back > 0).all()


def test_scales_are_float32_whatever_the_weights_dtype_and_give_the_exact_codes():
    w = torch.tensor([[3.0, 0.006500244140625, 0.01129150390625]], dtype=torch.bfloat16)
    codes, scale = quantise(w)
    assert scale.dtype == torch.float32
    assert scale.item() == pytest.approx(149.33333, abs=1e-5)
    # A bfloat16 scale (149.0) makes the first 0.9375; a bfloat16 multiply makes the second 1.75.
    assert codes.float().tolist() == [[448.0, 1.0, 1.625]]


def test_power_of_two_scales_round_down_just_below_a_power_of_two():
    powers = torch.exp2(torch.arange(-100, 30, dtype=torch.float64))
    below = torch.nextafter(powers.float(), torch.tensor(0.0)).double()
    assert torch.equal(scale_from_amax(448.0 / powers, E4M3, power_of_two=True).double(), powers)
    assert torch.equal(scale_from_amax(448.0 / below, E4M3, power_of_two=True).double(), powers / 2)


@BOTH
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_is_not_finite_becomes_nan_and_never_a_plausible_number(dtype, bad, x_dtype, dim, power_of_two):
    x = torch.randn(8, 16).to(x_dtype)
    x[3, 5] = bad
    codes, scale = quantise(x, dtype, dim, power_of_two)
    assert codes[3, 5].float().isnan()
    assert scale.isnan().any()
    if dim is None:
        assert codes.float().isnan().all()
    known = cast(x, torch.tensor(2.0), dtype)  # a scale that was known before, as in delayed scaling
    assert known.float().isnan().sum() == 1 and known[3, 5].float().isnan()


@BOTH
def test_finite_overflow_saturates(dtype):
    x = torch.tensor([1e30, -1e30, 3.4e38, 1.0])
    assert cast(x, torch.tensor(1e12), dtype).float().tolist() == [
        MAX[dtype],
        -MAX[dtype],
        MAX[dtype],
        MAX[dtype],
    ]


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_empty_tensors_have_amax_zero(shape, dim):
    codes, scale = quantise(torch.empty(shape), dim=dim)
    assert codes.shape == shape and codes.dtype == E4M3
    assert scale.isfinite().all()


def test_a_port_occupies_one_number_and_hands_its_gradient_back():
    w = torch.randn(3, 5, dtype=torch.bfloat16)
    port = port_of(w, torch.float32)
    assert port.shape == w.shape and port.untyped_storage().nbytes() == 4
    g = torch.randn(3, 5)
    _, pull = torch.func.vjp(lambda w: port_of(w, torch.float32), w)
    assert torch.equal(pull(g)[0], g.bfloat16())


@pytest.mark.parametrize(("dtype", "bar"), [(E4M3, 31.0), (E5M2, 25.0)])
def test_signal_to_noise_of_a_cast(dtype, bar):
    torch.manual_seed(0)
    x = torch.randn(512, 512)
    noise = sqnr(x, dequantise(*quantise(x, dtype)))
    assert bar < noise < bar + 2


def test_one_outlier_ruins_a_tensor_scale_and_one_row_of_a_row_scale():
    torch.manual_seed(0)
    x = torch.randn(256, 256)
    x[7, 11] = 1e6
    rest = [i for i in range(256) if i != 7]

    def noise(dim):
        return sqnr(x[rest], dequantise(*quantise(x, dim=dim))[rest])

    assert noise(None) < 1
    assert noise(1) > 31


def test_cast_loss_counts_what_saturates_and_what_vanishes():
    x = torch.tensor([1000.0, 1.0, 1e-9, 0.0])
    saturated, flushed = cast_loss(x, torch.tensor(1.0), E4M3)
    assert (saturated.item(), flushed.item()) == (0.25, 0.25)
