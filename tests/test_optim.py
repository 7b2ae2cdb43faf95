"""Laws of ftrain.optim: it computes what torch.optim does, purely, however it is composed."""

import math

import pytest
import torch

from ftrain import fused, optim, tree

BETAS, EPS = (0.9, 0.95), 1e-8


def params_of(seed=0, dtype=torch.float32):
    """A small tree with a matrix, a norm, a list, and a leaf that holds no rows on this rank."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"w": (7, 5), "norm": (5,), "layers": [{"wq": (4, 6)}, {"wq": (0, 6)}]}
    return tree.map(
        lambda shape: torch.randn(shape, generator=g, dtype=dtype),
        shapes_to_tree(shapes),
    )


def shapes_to_tree(node):
    """Shapes as leaves: optree would take a tuple for a container."""
    if isinstance(node, dict):
        return {key: shapes_to_tree(value) for key, value in node.items()}
    return [shapes_to_tree(item) for item in node] if isinstance(node, list) else torch.Size(node)


def copy(t):
    return tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, t)


def same(a, b):
    pairs = zip(tree.named_leaves(a), tree.leaves(b), strict=True)
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for (_, x), y in pairs)


def close(a, b, rtol=2e-6, atol=1e-7):
    for (path, x), y in zip(tree.named_leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, msg=lambda m, path=path: f"{path}: {m}")


def rule(**kwargs):
    lr = optim.schedule("cosine", 1e-2, steps=20, warmup_steps=3, min_lr_ratio=0.1)
    return optim.adamw(lr, BETAS, EPS, **kwargs)


def by_hand(optimizer):
    """The same optimizer without the shortcuts of `step`."""
    return optim.Optimizer(optimizer.init, optimizer.update, norm=optimizer.norm, lr=optimizer.lr)


@pytest.mark.parametrize("fast", [False, True], ids=["update", "apply"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_adamw_is_torch_adamw_over_20_steps(options, fast):
    optimizer = rule(weight_decay=0.1) if fast else by_hand(rule(weight_decay=0.1))
    params = params_of()
    state = optimizer.init(params)
    reference = [leaf.clone().requires_grad_() for leaf in tree.leaves(params)]
    groups = [
        {"params": [p for p in reference if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in reference if p.ndim < 2], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPS, **options)
    for i in range(20):
        grads = params_of(seed=100 + i)
        params, state, stats = optim.step(optimizer, grads, state, params)
        for group in torchs.param_groups:
            group["lr"] = stats["lr"]
        for p, g in zip(reference, tree.leaves(grads), strict=True):
            p.grad = g.clone()
        torchs.step()
    assert state.count == 20
    close(tree.leaves(params), [p.detach() for p in reference])
    close(tree.leaves(state.mu), [torchs.state[p]["exp_avg"] for p in reference])
    close(tree.leaves(state.nu), [torchs.state[p]["exp_avg_sq"] for p in reference])


def test_sgd_is_torch_sgd_with_momentum():
    optimizer, params = optim.sgd(0.1, momentum=0.9), params_of()
    state = optimizer.init(params)
    reference = [leaf.clone().requires_grad_() for leaf in tree.leaves(params)]
    torchs = torch.optim.SGD(reference, lr=0.1, momentum=0.9)
    for i in range(5):
        grads = params_of(seed=i)
        params, state, _ = optim.step(optimizer, grads, state, params)
        for p, g in zip(reference, tree.leaves(grads), strict=True):
            p.grad = g.clone()
        torchs.step()
    close(tree.leaves(params), [p.detach() for p in reference])


CHAINS = {
    "adamw": lambda: rule(),
    "clip": lambda: optim.chain(optim.clip_by_global_norm(0.7), rule()),
    "no clip": lambda: optim.chain(optim.clip_by_global_norm(math.inf), rule()),
    "two clips": lambda: optim.chain(optim.clip_by_global_norm(3.0), optim.clip_by_global_norm(0.5), rule()),
    "nested": lambda: optim.chain(
        optim.chain(optim.clip_by_global_norm(3.0)), optim.chain(optim.clip_by_global_norm(0.5), rule())
    ),
    "low moments": lambda: optim.chain(optim.clip_by_global_norm(0.7), rule(moments=torch.bfloat16)),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("scale", [None, 1 / 37])
def test_the_one_pass_path_gives_the_numbers_of_update_and_apply_updates(name, scale):
    optimizer = CHAINS[name]()
    assert optimizer.apply is not None
    scale = None if scale is None else torch.tensor(scale)
    fast = slow = (params_of(), optimizer.init(params_of()))
    for i in range(4):
        grads = params_of(seed=i)
        *fast, a = optim.step(optimizer, grads, fast[1], fast[0], scale=scale)
        *slow, b = optim.step(by_hand(optimizer), grads, slow[1], slow[0], scale=scale)
        torch.testing.assert_close(a["grad_norm"], b["grad_norm"])
        assert a["lr"] == b["lr"] > 0
    close(fast[0], slow[0], rtol=1e-5)
    # The norm is that of the scaled gradient before clipping.
    expected = torch.cat([leaf.flatten() for leaf in tree.leaves(grads)]).norm() * (1.0 if scale is None else scale)
    torch.testing.assert_close(a["grad_norm"], expected)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("scale", [None, torch.tensor(1 / 37)], ids=["plain", "scaled"])
def test_donation_changes_buffers_and_no_numbers(name, scale):
    optimizer = CHAINS[name]()
    params, grads = params_of(), params_of(seed=1)
    state = optimizer.init(params)
    before = copy((params, grads, state))
    kept_params, kept_state, _ = optim.step(optimizer, grads, state, params, scale=scale)
    assert same((params, grads, state), before), "inputs must stay as they were"
    new_params, new_state, _ = optim.step(optimizer, grads, state, params, scale=scale, donate=True)
    assert same(new_params, kept_params) and same(new_state, kept_state)
    for new, old in zip(tree.leaves(new_params), tree.leaves(params), strict=True):
        assert new is old
    for new, old in zip(tree.leaves(new_state), tree.leaves(state), strict=True):
        assert new is old or isinstance(new, int)


def test_without_torchs_fused_kernel_the_numbers_are_the_same(monkeypatch):
    optimizer, scale = CHAINS["clip"](), torch.tensor(0.1)
    params, grads = params_of(), params_of(seed=1)
    state = optimizer.init(params)
    quick, _, _ = optim.step(optimizer, grads, state, params, scale=scale)
    monkeypatch.setattr(fused, "FUSED_DEVICES", ())
    plain, _, _ = optim.step(optimizer, grads, state, params, scale=scale)
    close(quick, plain)


@pytest.mark.parametrize("donate", [False, True])
def test_gradients_that_share_memory_or_lie_transposed_are_read_right(donate):
    optimizer, scale = CHAINS["clip"](), torch.tensor(0.25)
    g = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    params = {"a": torch.ones(6, 6), "b": torch.ones(6, 6), "c": torch.ones(6, 6), "d": torch.ones(6, 6)}
    shared = {"a": g, "b": g, "c": g.t(), "d": torch.ones(()).expand(6, 6)}
    apart = {key: value.clone(memory_format=torch.contiguous_format) for key, value in shared.items()}
    expected, _, _ = optim.step(optimizer, apart, optimizer.init(params), params, scale=scale)
    got, _, _ = optim.step(optimizer, shared, optimizer.init(params), copy(params), scale=scale, donate=donate)
    assert same(got, expected)


def test_transposed_parameters_get_the_numbers_of_contiguous_ones():
    optimizer = rule()
    p, g = params_of()["w"], params_of(seed=1)["w"]
    straight, _, _ = optim.step(optimizer, {"w": g}, optimizer.init({"w": p}), {"w": p})
    turned = {"w": p.t().contiguous().t()}
    got, _, _ = optim.step(optimizer, {"w": g}, optimizer.init(turned), turned)
    close(got, straight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moments_are_at_least_fp32(dtype):
    params = params_of(dtype=dtype)
    optimizer = CHAINS["clip"]()
    state = optimizer.init(params)
    wanted = torch.promote_types(dtype, torch.float32)
    assert {leaf.dtype for leaf in tree.leaves(state[1].mu)} == {wanted}
    grads = params_of(seed=1, dtype=dtype)
    fast, _, stats = optim.step(optimizer, grads, state, params, scale=torch.tensor(0.1))
    slow, _, _ = optim.step(by_hand(optimizer), grads, state, params, scale=torch.tensor(0.1))
    assert {leaf.dtype for leaf in tree.leaves(fast)} == {dtype}
    close(fast, slow, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("fast", [False, True], ids=["update", "apply"])
def test_moments_in_bf16_are_rounded_once_an_update_and_nothing_else_is(fast):
    low, exact = (rule(moments=dtype) for dtype in (torch.bfloat16, torch.float32))
    low, exact = (low, exact) if fast else (by_hand(low), by_hand(exact))
    params = params_of()
    state, truth = low.init(params), exact.init(params)
    for i in range(5):
        grads = params_of(seed=i)
        new, state, _ = optim.step(low, grads, state, params)
        expected, truth, _ = optim.step(exact, grads, truth, params)
        close(new, expected)
        close(state, tree.map(lambda x: x.bfloat16() if isinstance(x, torch.Tensor) else x, truth), rtol=0, atol=0)
        assert {leaf.dtype for leaf in tree.leaves((state.mu, state.nu))} == {torch.bfloat16}
        params, truth = new, tree.map(lambda x: x.float() if isinstance(x, torch.Tensor) else x, state)


def test_large_leaves_are_widened_in_pieces_and_come_out_the_same(monkeypatch):
    optimizer = rule(moments=torch.bfloat16)
    params, grads = params_of(), params_of(seed=1)
    state = optimizer.init(params)
    whole = optim.step(optimizer, grads, state, params)[:2]
    monkeypatch.setattr(fused, "PIECE", 8)
    assert same(optim.step(optimizer, grads, state, params)[:2], whole)


def test_momentum_can_be_kept_in_bf16():
    low, exact = (optim.sgd(0.1, momentum=0.9, moments=dtype) for dtype in (torch.bfloat16, torch.float32))
    params, grads = params_of(), params_of(seed=1)
    new, state, _ = optim.step(low, grads, low.init(params), params)
    expected, truth, _ = optim.step(exact, grads, exact.init(params), params)
    close(new, expected)
    close(state.mu, tree.map(torch.Tensor.bfloat16, truth.mu), rtol=0, atol=0)


def test_a_decay_that_low_precision_moments_would_round_away_is_refused():
    optim.adamw(1e-3, (0.9, 0.99), moments=torch.bfloat16)
    with pytest.raises(ValueError, match=r"0\.999.*bfloat16.*0\.001 .*0\.99609"):
        optim.adamw(1e-3, (0.9, 0.999), moments=torch.bfloat16)
    with pytest.raises(ValueError, match="sgd"):
        optim.sgd(0.1, momentum=0.998, moments=torch.bfloat16)
    # What the bound says: half of the moment's own decay is the most that rounding to nearest can undo.
    for beta, stays in ((0.999, True), (0.99, False)):
        v = torch.tensor([1.0, 1.01, 1.5, 1.99]).bfloat16()
        assert ((v.float() * beta).bfloat16() == v).any().item() is stays


def test_leaves_pair_by_name_whatever_the_order_of_the_keys():
    params = {"wk": torch.zeros(1), "wv": torch.zeros(1)}
    grads = {"wv": torch.ones(1), "wk": -torch.ones(1)}
    for optimizer in (optim.adamw(0.1, weight_decay=0.0), by_hand(optim.adamw(0.1, weight_decay=0.0))):
        new, _, _ = optim.step(optimizer, grads, optimizer.init(params), params)
        torch.testing.assert_close(new, {"wk": torch.tensor([0.1]), "wv": torch.tensor([-0.1])})
        reordered = optimizer.init({"wv": params["wv"], "wk": params["wk"]})
        assert same(optim.step(optimizer, grads, reordered, params)[0], new)


@pytest.mark.parametrize(
    ("grads", "words"),
    [
        ({"a": torch.ones(2), "b": None}, "b"),
        ({"a": torch.ones(2)}, "b"),
        ({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, "c"),
        ({"a": torch.ones(2), "b": torch.ones(1)}, r"b: the parameter is \(3,\).*\(1,\)"),
    ],
)
def test_trees_that_do_not_pair_are_refused_by_name(grads, words):
    params = {"a": torch.ones(2), "b": torch.ones(3)}
    optimizer = optim.adamw(0.1)
    for call in (
        optim.step,
        lambda o, g, s, p: o.update(g, s, p),
        lambda o, g, s, p: optim.apply_updates(p, g),
    ):
        with pytest.raises(ValueError, match=words):
            call(optimizer, grads, optimizer.init(params), params)


@pytest.mark.parametrize("leaf", [3, torch.ones(2, dtype=torch.int64)])
def test_leaves_that_cannot_be_trained_are_refused_by_name(leaf):
    for optimizer in (optim.adamw(0.1), optim.sgd(0.1)):
        with pytest.raises(ValueError, match="layers.0.wq is a"):
            optimizer.init({"layers": [{"wq": leaf}]})
        with pytest.raises(ValueError, match="3"):
            optimizer.init({3: torch.ones(2)})


def test_decay_touches_what_the_mask_says_and_by_default_no_norm():
    params = params_of()
    zeros = tree.map(torch.zeros_like, params)
    optimizer = optim.adamw(0.5, weight_decay=0.1)
    new, _, _ = optim.step(optimizer, zeros, optimizer.init(params), params)
    close(new["w"], params["w"] * 0.95)
    assert same(new["norm"], params["norm"])
    for optimizer in (
        optim.adamw(0.5, weight_decay=0.1, mask=tree.map(lambda p: p.ndim == 1, params)),
        by_hand(optim.adamw(0.5, weight_decay=0.1, mask=lambda params: tree.map(lambda p: p.ndim == 1, params))),
    ):
        new, _, _ = optim.step(optimizer, zeros, optimizer.init(params), params)
        assert same(new["w"], params["w"])
        close(new["norm"], params["norm"] * 0.95)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_clipping_bounds_the_norm_and_leaves_smaller_ones_bitwise(size):
    grads = tree.map(lambda g: g * size, params_of())
    clipped, _ = optim.clip_by_global_norm(0.5).update(grads, (), None)
    norm = optim.global_norm(grads)
    if norm <= 0.5:
        assert same(clipped, grads)
    else:
        torch.testing.assert_close(optim.global_norm(clipped), torch.tensor(0.5))


def test_clipping_a_gradient_of_zeros_gives_zeros_and_nan_stays_nan():
    clip = optim.clip_by_global_norm(1.0)
    zeros = {"a": torch.zeros(3)}
    assert same(clip.update(zeros, (), None)[0], zeros)
    assert clip.update({"a": torch.tensor([math.nan, 1.0])}, (), None)[0]["a"].isnan().all()


def test_the_norm_can_be_replaced_and_is_taken_once():
    calls = []

    def norm(grads):
        calls.append(1)
        return optim.global_norm(grads) * 2  # as if another rank held as much again

    optimizer, params = optim.chain(optim.clip_by_global_norm(1.0, norm=norm), rule()), params_of()
    _, _, stats = optim.step(optimizer, params, optimizer.init(params), params)
    torch.testing.assert_close(stats["grad_norm"], optim.global_norm(params) * 2)
    assert len(calls) == 1


def test_the_norm_of_low_precision_and_of_empty_trees():
    assert optim.global_norm({"a": torch.full((512,), 0.1, dtype=torch.bfloat16)}).dtype == torch.float32
    assert optim.global_norm({"a": torch.zeros(0, 4)}) == 0
    assert optim.global_norm({}) == 0


def test_a_transform_of_ones_own_composes():
    def update(grads, state, params):
        return tree.map(torch.sign, grads), state

    signs = optim.Optimizer(lambda params: (), update)
    optimizer, params = optim.chain(signs, optim.sgd(0.1)), params_of()
    assert optimizer.apply is None
    new, _, stats = optim.step(optimizer, params_of(1), optimizer.init(params), params, donate=True)
    close(new, tree.map(lambda p, g: p - 0.1 * g.sign(), params, params_of(1)))
    assert stats["lr"] == 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_can_be_skipped(bad):
    optimizer, params = CHAINS["clip"](), params_of()
    state, before = optimizer.init(params), copy(params)
    grads = params_of(1)
    grads["w"][0, 0] = bad
    new, new_state, stats = optim.step(optimizer, grads, state, params, donate=True, skip_nonfinite=True)
    assert new is params and new_state is state and same(params, before)
    assert not stats["grad_norm"].isfinite()
    again, _, _ = optim.step(optimizer, params_of(1), state, params, skip_nonfinite=True)
    assert same(again, optim.step(optimizer, params_of(1), state, params)[0])


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd", "none"])
@pytest.mark.parametrize("warmup", [0, 1, 2, 10])
@pytest.mark.parametrize("decay_steps", [None, 0, 8, 10])
@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
def test_schedules_stay_between_the_minimum_and_the_peak(decay, warmup, decay_steps, ratio):
    lr = optim.schedule(decay, 0.3, steps=10, warmup_steps=warmup, decay_steps=decay_steps, min_lr_ratio=ratio)
    rates = [lr(step) for step in range(1, 14)]
    assert rates[0] > 0
    assert max(rates) == 0.3 == lr(max(1, warmup))
    assert min(rates) >= 0.3 * ratio >= 0
    peak = rates.index(0.3)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if decay != "none" and decay_steps != 0 and max(1, warmup) < 10 and (decay != "wsd" or decay_steps != 0):
        assert lr(10) == lr(11) == 0.3 * ratio


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd", "none"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_run_of_one_step_trains_at_the_peak(decay, warmup):
    assert optim.schedule(decay, 0.3, steps=1, warmup_steps=warmup)(1) == 0.3


def test_wsd_has_a_plateau():
    lr = optim.schedule("wsd", 1.0, steps=100, warmup_steps=10)
    assert [lr(10), lr(50), lr(80)] == [1.0] * 3
    assert lr(90) == pytest.approx(0.5)


def test_schedules_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="11 steps in a run of 10"):
        optim.schedule("cosine", 1.0, steps=10, warmup_steps=11)
    with pytest.raises(ValueError, match="cosin"):
        optim.schedule("cosin", 1.0, steps=10)
    with pytest.raises(ValueError, match="min_lr_ratio=2"):
        optim.schedule("cosine", 1.0, steps=10, min_lr_ratio=2)
