"""Bit for bit what torchao's Float8Linear does, for the recipes that both have."""

import logging
import warnings

import pytest
import torch

from ftrain.fp8 import E4M3, E5M2, MAX, RECIPES, amax, cast, scale_from_amax
from ftrain.fp8.linear import linear

SHAPES = [(4, 16, 32, 48), (2, 8, 16, 16), (1, 5, 7, 3), (3, 24, 40, 24), (1, 1, 128, 64)]
NAMES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


@pytest.fixture(scope="module")
def torchao():
    """torchao's modules; importing them warns about extensions that are not used here."""
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            from torchao.float8 import config, float8_linear, float8_scaling_utils, float8_utils
        finally:
            logging.disable(before)
    return {
        "config": config.Float8LinearConfig,
        "linear": float8_linear.Float8Linear,
        "granularity": config.ScalingGranularity,
        "cast": float8_scaling_utils.hp_tensor_to_float8_dynamic,
        "scale": float8_utils.tensor_to_scale,
        "floor": float8_utils._round_scale_down_to_power_of_2,
    }


def theirs(torchao, x, w, g, name):
    module = torch.nn.Linear(w.shape[1], w.shape[0], bias=False).to(w.dtype)
    module.weight = torch.nn.Parameter(w.clone())
    module = torchao["linear"].from_float(module, torchao["config"].from_recipe_name(name))
    x = x.clone().requires_grad_()
    try:
        y = module(x)
    except RuntimeError as error:
        if "only supports per-tensor scaling for CPU" in str(error):
            pytest.skip("this torch has no row-scaled product on the CPU, which torchao asks for")
        raise
    return y.detach(), *torch.autograd.grad(y, [x, module.weight], g)


def ours(x, w, g, name):
    y, pull = torch.func.vjp(lambda x, w: linear(x, [w], RECIPES[name])[0], x, w)
    return y, *pull(g)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_are_the_same_bits(torchao, shape, dtype, name):
    torch.manual_seed(0)
    b, s, k, n = shape
    x, w = torch.randn(b, s, k).to(dtype), (torch.randn(n, k) * k**-0.5).to(dtype)
    g = (torch.randn(b, s, n) * 1e-3).to(dtype)
    for a, b in zip(ours(x, w, g, name), theirs(torchao, x, w, g, name), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dim", [None, 0, -1])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
def test_codes_and_scales_are_the_same_bits(torchao, dtype, dim, power_of_two, x_dtype):
    torch.manual_seed(0)
    x = (torch.randn(64, 96) * torch.logspace(-6, 6, 64)[:, None]).to(x_dtype)
    granularity = torchao["granularity"].TENSORWISE if dim is None else torchao["granularity"].AXISWISE
    they = torchao["cast"](
        x,
        dtype,
        None,
        scaling_granularity=granularity,
        axiswise_dim=dim,
        round_scales_to_power_of_2=power_of_two,
    )
    scale = scale_from_amax(amax(x, dim), dtype, power_of_two)
    assert torch.equal(scale, they._scale)
    assert torch.equal(cast(x, scale, dtype).view(torch.uint8), they._data.view(torch.uint8))


def test_the_one_difference_scales_just_below_a_power_of_two(torchao):
    """torchao floors by exp2(floor(log2(scale))), whose log2 rounds up there; ours masks the mantissa."""
    powers = torch.exp2(torch.arange(-100, 41, dtype=torch.float64))
    below = torch.nextafter(powers.float(), torch.tensor(0.0))
    mine = scale_from_amax(MAX[E4M3] / below.double(), E4M3, power_of_two=True)
    assert torch.equal(mine[below < 4e14].double(), (powers / 2)[below < 4e14])
    assert (torchao["floor"](below).double() == powers).sum() > 130
