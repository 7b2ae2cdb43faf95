"""The differentiable layer: one cast for several weights, codes as weights, histories, all transforms."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftrain.fp8 import E4M3, NONE, RECIPES, History, Scaled, amax, cast, parse, scale_from_amax, scaled_weight
from ftrain.fp8.linear import column, linear, row
from ftrain.fp8.measure import sqnr

DYNAMIC = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
FP8_NAMES = pytest.mark.parametrize("name", DYNAMIC)


def example(dtype=torch.bfloat16, widths=(48, 16, 24), b=2, s=16, k=32):
    torch.manual_seed(0)
    x = torch.randn(b, s, k).to(dtype)
    weights = [(torch.randn(n, k) * k**-0.5).to(dtype) for n in widths]
    grads = [torch.randn(b, s, n).to(dtype) for n in widths]
    return x, weights, grads


def pull(fn, primals, cotangents):
    """(outputs, gradients) by torch.func."""
    outputs, vjp = torch.func.vjp(fn, *primals)
    return outputs, vjp(cotangents)


def same(a, b):
    return all(torch.equal(i, j) for i, j in zip(a, b, strict=True))


@FP8_NAMES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_several_weights_are_the_layers_one_by_one(name, dtype):
    x, weights, grads = example(dtype)
    recipe = RECIPES[name]
    together, (gx, *gw) = pull(lambda x, *w: linear(x, w, recipe), (x, *weights), tuple(grads))
    total = 0
    for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
        (alone,), (gx_alone, gw_alone) = pull(lambda x, w: linear(x, [w], recipe), (x, w), (g,))
        assert torch.equal(alone, together[i]) and torch.equal(gw_alone, gw[i])
        total = total + gx_alone.float()
    assert torch.equal(gx, total.to(dtype))


def test_high_precision_is_plain_torch():
    x, (w, *_), (g, *_) = example()
    (y,), grads = pull(lambda x, w: linear(x, [w], NONE), (x, w), (g,))
    wanted, wanted_grads = pull(torch.nn.functional.linear, (x, w), g)
    assert torch.equal(y, wanted) and same(grads, wanted_grads)


@pytest.mark.parametrize("name", DYNAMIC + ["delayed", "blockwise"])
def test_signal_to_noise_of_outputs_and_gradients(name):
    x, (w,), (g,) = example(torch.float32, (256,), s=128, k=512)
    (y,), (gx, gw) = run(name, x, w, g)
    wanted, (wanted_gx, wanted_gw) = pull(torch.nn.functional.linear, (x, w), g)
    assert sqnr(wanted, y) > 25 and sqnr(wanted_gx, gx) > 22 and sqnr(wanted_gw, gw) > 22


def run(name, x, w, g, known=1.0):
    """One weight; for a recipe with histories, with the scales that fit (times known)."""
    recipe = RECIPES[name]
    if name != "delayed":
        return pull(lambda x, w: linear(x, [w], recipe), (x, w), (g,))
    formats = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
    x_scale, w_scale, g_scale = (known * scale_from_amax(amax(t), f) for t, f in zip((x, w, g), formats, strict=True))
    port = torch.zeros(())

    def layer(x, w):
        weight = scaled_weight(w, w_scale, E4M3, w.dtype)
        return linear(x, [weight], recipe, x_history=History(x_scale, port), g_histories=[History(g_scale, port)])

    return pull(layer, (x, w), (g,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_that_were_cast_before_are_the_weight_itself(dtype):
    x, (w, *_), (g, *_) = example(dtype)
    recipe = RECIPES["tensorwise"]
    scale = scale_from_amax(amax(w), E4M3)
    inline = pull(lambda x, w: linear(x, [w], recipe), (x, w), (g,))
    before = pull(lambda x, w: linear(x, [scaled_weight(w, scale, E4M3, dtype)], recipe), (x, w), (g,))
    assert same(inline[0], before[0]) and same(inline[1], before[1])

    codes = cast(w, scale, E4M3)
    port = torch.zeros((), dtype=dtype).expand(w.shape)
    gathered = pull(lambda x, port: linear(x, [Scaled(codes, scale, port)], recipe), (x, port), (g,))
    assert same(inline[0], gathered[0]) and same(inline[1], gathered[1])


def test_gradients_have_the_dtype_of_what_they_are_gradients_of():
    x, (w, *_), (g, *_) = example(torch.bfloat16)
    for name in DYNAMIC + ["none"]:
        _, (gx, gw) = pull(lambda x, w, r=RECIPES[name]: linear(x, [w], r), (x, w.float()), (g,))
        assert gx.dtype == torch.bfloat16 and gw.dtype == torch.float32
    port = torch.zeros(()).expand(w.shape)
    scaled = scale_from_amax(amax(w), E4M3)
    _, (gp,) = pull(
        lambda p: linear(x, [Scaled(cast(w, scaled, E4M3), scaled, p)], RECIPES["tensorwise"]), (port,), (g,)
    )
    assert gp.dtype == torch.float32


@FP8_NAMES
def test_autograd_and_torch_func_agree_and_there_is_no_second_derivative(name):
    x, (w, *_), (g, *_) = example()
    recipe = RECIPES[name]
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    (y,) = linear(leaves[0], [leaves[1]], recipe)
    by_func = pull(lambda x, w: linear(x, [w], recipe), (x, w), (g,))
    assert torch.equal(y, by_func[0][0])
    assert same(torch.autograd.grad(y, leaves, g), by_func[1])
    (y,) = linear(leaves[0], [leaves[1]], recipe)
    (gx,) = torch.autograd.grad(y.float().square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gx.float().sum(), leaves[1])


def test_an_output_that_nobody_uses_has_no_gradient():
    x, weights, _ = example()
    leaves = [t.clone().requires_grad_() for t in (x, *weights)]
    outputs = linear(leaves[0], leaves[1:], RECIPES["tensorwise"])
    grads = torch.autograd.grad(outputs[1].float().sum(), leaves, allow_unused=True)
    assert [grad is None for grad in grads] == [False, True, False, True]


def saved_bytes(name, weight):
    x, _, _ = example(widths=(), b=1, s=64, k=64)
    x.requires_grad_()
    sizes = []

    def pack(t):
        sizes.append(t.numel() * t.element_size() if t.untyped_storage().data_ptr() not in free else 0)
        return t

    free = {t.untyped_storage().data_ptr() for t in weight if isinstance(t, torch.Tensor)}
    weight = weight if isinstance(weight, Scaled) else weight[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        linear(x, [weight], RECIPES[name])
    return sum(sizes)


def test_the_saved_activation_is_the_fp8_one_where_the_recipe_allows_it():
    w = (torch.randn(64, 64) / 8).bfloat16().requires_grad_()
    assert 64 * 64 <= saved_bytes("tensorwise", [w]) < 64 * 64 + 64
    assert 64 * 64 <= saved_bytes("rowwise", [w]) < 64 * 64 + 64 * 4 + 64
    assert 2 * 64 * 64 <= saved_bytes("rowwise_with_gw_hp", [w]) < 2 * 64 * 64 + 64
    scale = scale_from_amax(amax(w.detach()), E4M3)
    assert saved_bytes("tensorwise", scaled_weight(w, scale, E4M3, w.dtype)) < 64 * 64 + 64


class Casts(TorchDispatchMode):
    """Counts conversions to fp8, by the shape converted."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        to = (kwargs or {}).get("dtype")
        if func is torch.ops.aten._to_copy.default and to is not None and to.itemsize == 1:
            self.shapes.append(tuple(out.shape))
        return out


def test_one_cast_of_x_serves_all_weights_and_both_products():
    x, weights, grads = example()
    leaves = [t.clone().requires_grad_() for t in (x, *weights)]
    with Casts() as casts:
        outputs = linear(leaves[0], leaves[1:], RECIPES["tensorwise"])
        assert casts.shapes.count((32, 32)) == 1
        casts.shapes.clear()
        torch.autograd.grad(outputs, leaves, grads)
    assert casts.shapes.count((32, 32)) == 0
    assert [casts.shapes.count((32, n)) for n in (48, 16, 24)] == [1, 1, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", DYNAMIC + ["delayed"])
@pytest.mark.parametrize("where", ["x", "w", "g"])
def test_what_is_not_finite_reaches_the_result(bad, name, where):
    x, (w, *_), (g, *_) = example()
    {"x": x[0, 3], "w": w[5], "g": g[0, 3]}[where][7] = bad
    (y,), (gx, gw) = run(name, x, w, g)
    reached = {"x": [y, gw], "w": [y, gx], "g": [gx, gw]}[where]
    for t in reached:
        assert not t.isfinite().all()


@pytest.mark.parametrize("name", DYNAMIC + ["none", "delayed"])
def test_all_zeros_give_zeros_and_zero_gradients(name):
    x, (w, *_), (g, *_) = example()
    (y,), (gx, gw) = run(name, torch.zeros_like(x), torch.zeros_like(w), g)
    assert not y.any() and not gx.any() and not gw.any()
    (y,), (gx, gw) = run(name, x, w, torch.zeros_like(g))
    assert y.isfinite().all() and not gx.any() and not gw.any()


@pytest.mark.parametrize("name", DYNAMIC + ["none", "delayed"])
@pytest.mark.parametrize(("s", "n"), [(0, 16), (16, 0)])
def test_no_tokens_or_no_outputs(name, s, n):
    x, (w,), (g,) = example(widths=(n,), s=s)
    (y,), (gx, gw) = run(name, x, w, g)
    assert y.shape == (2, s, n) and gx.shape == x.shape and gw.shape == w.shape
    assert not y.any() and not gx.any() and not gw.any()


def test_histories_scale_the_step_and_report_its_amaxes():
    x, weights, grads = example(torch.float32)
    recipe = RECIPES["delayed"]
    scaled = [scaled_weight(w, scale_from_amax(amax(w), E4M3), E4M3, w.dtype) for w in weights]

    def layer(x, x_port, *g_ports):
        histories = [History(torch.tensor(2.0**k), port) for k, port in enumerate(g_ports)]
        return linear(x, scaled, recipe, x_history=History(torch.tensor(4.0), x_port), g_histories=histories)

    ports = [torch.zeros(()) for _ in range(4)]
    outputs, (_, *seen) = pull(layer, (x, *ports), tuple(grads))
    assert [s.item() for s in seen] == [amax(t).item() for t in (x, *grads)]
    # The scales are the ones that were passed.
    codes = cast(x.flatten(0, 1), torch.tensor(4.0), E4M3).float() / 4
    wanted = codes @ (scaled[0].data.float() / scaled[0].scale).T
    torch.testing.assert_close(outputs[0].flatten(0, 1), wanted, rtol=1e-5, atol=1e-5)


def test_without_a_known_scale_a_history_is_dynamic_and_still_observed():
    x, (w, *_), (g, *_) = example()
    weight = scaled_weight(w, scale_from_amax(amax(w), E4M3), E4M3, w.dtype)

    def layer(x, x_port, g_port):
        histories = {"x_history": History(None, x_port), "g_histories": [History(None, g_port)]}
        return linear(x, [weight], RECIPES["delayed"], **histories)

    zero = torch.zeros(())
    (y,), (gx, seen_x, seen_g) = pull(layer, (x, zero, zero), (g,))
    (wanted,), (wanted_gx,) = pull(lambda x: linear(x, [weight], RECIPES["tensorwise"]), (x,), (g,))
    assert torch.equal(y, wanted) and torch.equal(gx, wanted_gx)
    assert (seen_x, seen_g) == (amax(x).float(), amax(g).float())


def test_a_recipe_may_mix_precisions_product_by_product():
    x, (w, *_), (g, *_) = example()
    recipe = parse({"base": "tensorwise", "output": "high"})
    (y,), (gx, gw) = pull(lambda x, w: linear(x, [w], recipe), (x, w), (g,))
    (_,), (wanted_gx, wanted_gw) = pull(lambda x, w: linear(x, [w], RECIPES["tensorwise"]), (x, w), (g,))
    assert torch.equal(y, x @ w.T) and torch.equal(gx, wanted_gx) and torch.equal(gw, wanted_gw)


def test_what_a_recipe_cannot_use_is_an_error():
    x, (w, *_), _ = example()
    weight = scaled_weight(w, torch.tensor(1.0), E4M3, w.dtype)
    history = History(torch.tensor(1.0), torch.zeros(()))
    delayed = RECIPES["delayed"]
    with pytest.raises(ValueError, match="uses it in high precision"):
        linear(x, [weight], parse({"base": "tensorwise", "grad_input": "high"}))
    with pytest.raises(ValueError, match="scaled_weight"):
        linear(x, [w], delayed, x_history=history, g_histories=[history])
    with pytest.raises(ValueError, match="x_history"):
        linear(x, [weight], delayed, g_histories=[history])
    with pytest.raises(ValueError, match="g_histories"):
        linear(x, [weight], delayed, x_history=history)
    with pytest.raises(ValueError, match="tokens"):
        linear(x[0, 0], [w], RECIPES["tensorwise"])


def test_without_a_group_the_parallel_forms_are_the_layer():
    x, weights, _ = example()
    for name in DYNAMIC:
        recipe = RECIPES[name]
        assert same(column(x, weights, recipe, None), linear(x, weights, recipe))
        assert torch.equal(row(x, weights[0], recipe, None), linear(x, [weights[0]], recipe)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", DYNAMIC + ["none"])
def test_compiled_gives_the_bits_of_eager(name):
    x, weights, grads = example()
    recipe = RECIPES[name]

    def layer(x, *weights):
        return linear(x, weights, recipe)

    def vjp(x, weights, grads):
        return pull(layer, (x, *weights), grads)

    eager = vjp(x, weights, tuple(grads))
    leaves = [t.clone().requires_grad_() for t in (x, *weights)]
    outputs = torch.compile(layer, fullgraph=True)(*leaves)
    assert same(outputs, eager[0])
    assert same(torch.autograd.grad(outputs, leaves, grads), eager[1])
    # A transform inside the compiled function: Dynamo by itself would differentiate the forward's casts.
    outputs, grads = torch.compile(vjp, fullgraph=True)(x, weights, tuple(grads))
    assert same(outputs, eager[0]) and same(grads, eager[1])


@pytest.mark.slow
def test_compiled_once_for_any_scale():
    x, (w, *_), _ = example()
    zero = torch.zeros(())

    def layer(x, w, x_scale, w_scale):
        weight = scaled_weight(w, w_scale, E4M3, w.dtype)
        history = History(x_scale, zero)
        return linear(x, [weight], RECIPES["delayed"], x_history=history, g_histories=[history])[0]

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for scale in (1.0, 2.0, 3.0):
        args = (x, w, torch.tensor(scale), torch.tensor(2 * scale))
        assert torch.equal(compiled(*args), layer(*args))
    assert counter.frame_count == 1
