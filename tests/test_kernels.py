"""Kernels give the numbers of the plain functions beside them, to the bit."""

import pytest
import torch

from ftrain.kernels import adamw, cast

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def moments(n, device):
    g = torch.Generator().manual_seed(0)
    p, m = torch.randn(n, generator=g), 0.1 * torch.randn(n, generator=g)
    return [t.to(device) for t in (p, m, 0.01 * torch.rand(n, generator=g), torch.randn(n, generator=g))]


OPTIONS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def test_plain_adamw_is_torch_adamw():
    p, m, v, g = moments(1000, "cpu")
    m.zero_(), v.zero_()
    reference = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for count in range(1, 6):
        reference.grad = 0.5 * g
        optimizer.step()
        adamw.adamw_(p, g, m, v, torch.tensor(0.5), count=count, **OPTIONS)
        torch.testing.assert_close(p, reference.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", adamw.MOMENTS)
@pytest.mark.parametrize("n", [1, 1000, 1024, 100_003])
def test_the_adamw_kernel_is_the_plain_function(n, kept, dtype):
    factor = torch.tensor(0.37, device="cuda")
    got, plain = moments(n, "cuda"), moments(n, "cuda")
    for tensors in (got, plain):
        tensors[1:3] = [t.to(kept) for t in tensors[1:3]]
    for count in range(1, 4):
        p, m, v, g = got
        adamw.adamw_(p, g.to(dtype), m, v, factor, count=count, **OPTIONS)
        p, m, v, g = plain
        beta1, beta2 = OPTIONS["beta1"], OPTIONS["beta2"]
        scalars = (1 - beta1, 1 - beta2, 1 - 1e-2 * 0.1, 1e-2 / (1 - beta1**count), (1 - beta2**count) ** -0.5)
        adamw._plain(p, g.to(dtype), m, v, factor, beta1, beta2, 1e-8, scalars)
    for a, b in zip(got, plain, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(4, 1), (64, 128), (100, 300), (0, 8), (256, 17), (1028, 1030), (2048, 4096)])
def test_the_cast_kernel_is_the_plain_function(shape, format):
    x = 100 * torch.randn(shape, device="cuda").bfloat16()
    scale = torch.tensor(torch.finfo(format).max / 250.0, device="cuda")  # some elements saturate
    assert cast.runs_on(x)
    for got, plain in zip(cast.cast_both(x, scale, format), cast.cast_both_plain(x, scale, format), strict=True):
        assert torch.equal(got.view(torch.uint8), plain.view(torch.uint8))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_cast_kernel_hides_no_nan_and_no_inf(format):
    x = torch.randn(64, 64, device="cuda").bfloat16()
    x[3, 5], x[7, 9], x[60, 1] = float("nan"), float("inf"), float("-inf")
    codes, codes_t = cast.cast_both(x, torch.tensor(1.0, device="cuda"), format)
    expected = ~x.isfinite()
    assert torch.equal(codes.float().isnan(), expected)
    assert torch.equal(codes_t.float().isnan(), expected.t())


def test_the_plain_cast_transposes():
    x = torch.randn(24, 40)
    codes, codes_t = cast.cast_both_plain(x, torch.tensor(10.0), torch.float8_e4m3fn)
    assert torch.equal(codes.float().t(), codes_t.float()) and codes_t.is_contiguous()
