"""The step: pure, weighted by tokens, unchanged by dials that are not mathematics, and nothing piles up."""

import gc
import math
import resource
from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from ftrain import Run, load_recipe, optim, tree
from ftrain.execution import Execution
from ftrain.models import llama
from ftrain.nn import IGNORE
from ftrain.sharding import initialize
from ftrain.step import TrainState, init_state, make_eval_step, make_train_step, split

CFG = llama.Config(vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, ffn_dim=48)


def adamw(lr=1e-2, weight_decay=0.1, clip=1.0):
    return optim.chain(optim.clip_by_global_norm(clip), optim.adamw(lr, betas=(0.9, 0.999), weight_decay=weight_decay))


def start(optimizer, seed=7):
    execution, declared = Execution(), llama.abstract(CFG)
    params = initialize(declared, execution.plans(declared), execution.mesh, seed)
    return init_state(params, optimizer)


def batch_of(step=0, valid=(1, 16, 7, 3)):
    """Four sequences of which so many targets count."""
    tokens = torch.randint(0, 64, (len(valid), 17), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    for row, count in enumerate(valid):
        targets[row, count:] = IGNORE
    return {"tokens": tokens[:, :-1], "targets": targets}


def copied(state):
    return tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)


def check_bitwise(got, expected):
    tree.check_same_structure(expected, got)
    for (path, a), b in zip(tree.named_leaves(got), tree.leaves(expected), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


def check_close(got, expected, tolerance=1e-5):
    tree.check_same_structure(expected, got)
    for (path, a), b in zip(tree.named_leaves(got), tree.leaves(expected), strict=True):
        a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
        assert (a - b).norm() <= tolerance * b.norm(), (path, (a - b).norm(), b.norm())


# --- a pure function ---------------------------------------------------------------------------------------


def test_a_state_that_is_not_donated_keeps_its_values():
    optimizer = adamw()
    step = make_train_step(llama.make_model(CFG).loss, optimizer, micro_batches=2)
    state, batch = start(optimizer), batch_of()
    before, batch_before = copied(state), copied(batch)
    after, metrics = step(state, batch)
    check_bitwise(state, before)
    check_bitwise(batch, batch_before)
    again, metrics_again = step(state, batch)
    check_bitwise(again, after)
    check_bitwise(metrics_again, metrics)


def test_donation_changes_buffers_and_no_numbers():
    optimizer = adamw()
    loss = llama.make_model(CFG).loss
    pure, donating = (make_train_step(loss, optimizer, micro_batches=2, donate=d) for d in (False, True))
    a, b = start(optimizer), start(optimizer)
    for i in range(3):
        b_before = tree.leaves((b.params, b.opt_state))
        a, a_metrics = pure(a, batch_of(i))
        b, b_metrics = donating(b, batch_of(i))
        check_bitwise(b, a)
        check_bitwise(b_metrics, a_metrics)
        for old, new in zip(b_before, tree.leaves((b.params, b.opt_state)), strict=True):
            assert not isinstance(new, torch.Tensor) or new.data_ptr() == old.data_ptr(), "donated, yet copied"


def test_a_train_state_is_a_tree():
    state = start(adamw())
    paths = tree.names(state)
    assert paths[0] == "step" and "params.layers.1.wq" in paths and "opt_state.1.mu.embedding" in paths
    doubled = tree.map(lambda x: x * 2, state)
    assert isinstance(doubled, TrainState) and torch.equal(doubled.params["norm"], state.params["norm"] * 2)
    leaves, treedef = torch.utils._pytree.tree_flatten(state)
    check_bitwise(torch.utils._pytree.tree_unflatten(leaves, treedef), state)


def test_post_transforms_run_in_order_on_every_state_that_is_made():
    def halve(state):
        return state._replace(params=tree.map(lambda p: p / 2, state.params))

    def mark(state):
        return state._replace(fp8_state=None, step=state.step + 100)

    optimizer = optim.sgd(0.0)
    params = {"w": torch.ones(2)}
    state = init_state(params, optimizer, (halve, mark))
    assert state.step == 100 and (state.params["w"] == 0.5).all()
    step = make_train_step(lambda p, b: ((p["w"] * b["x"]).sum(), b["x"].sum()), optimizer, (halve, mark))
    state, _ = step(state, {"x": torch.ones(1, 2)})
    assert state.step == 201 and (state.params["w"] == 0.25).all()


# --- the numbers -------------------------------------------------------------------------------------------


def weighted(params, batch):
    """A loss of one's own: the sum of w * x where `counts`."""
    return (params["w"] * batch["x"] * batch["counts"]).sum(), batch["counts"].sum()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_token_weighs_the_same_however_tokens_fall_in_micro_batches(micro_batches):
    batch = {
        "x": torch.tensor([[4.0, 9.0, 9.0], [0.0, 0.0, 0.0]]),
        "counts": torch.tensor([[1, 0, 0], [1, 1, 1]]),
    }
    optimizer = optim.sgd(0.5)
    step = make_train_step(weighted, optimizer, micro_batches=micro_batches)
    state, metrics = step(init_state({"w": torch.ones(())}, optimizer), batch)
    assert metrics["loss"] == 1.0 and metrics["grad_norm"] == 1.0 and metrics["tokens"] == 4
    assert state.params["w"] == 1.0 - 0.5 * 1.0


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_accumulation_changes_no_gradient(micro_batches):
    optimizer = optim.sgd(1.0)  # so that the parameters' change is the gradient
    loss = llama.make_model(CFG).loss
    whole, metrics = make_train_step(loss, optimizer)(start(optimizer), batch_of())
    parts, parts_metrics = make_train_step(loss, optimizer, micro_batches=micro_batches)(start(optimizer), batch_of())
    initial = start(optimizer).params
    check_close(*(tree.map(lambda a, b: a - b, new.params, initial) for new in (parts, whole)), tolerance=2e-5)
    check_close(parts_metrics, metrics)
    assert metrics["tokens"] == 27


def test_clipping_sees_the_whole_gradient_once():
    batch = {"x": torch.tensor([[3.0], [5.0]]), "counts": torch.ones(2, 1)}
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1.0))
    step = make_train_step(weighted, optimizer, micro_batches=2)
    state, metrics = step(init_state({"w": torch.ones(())}, optimizer), batch)
    assert metrics["grad_norm"] == 4.0 and state.params["w"] == 0.0


def shares_gradients(params, batch):
    """Autograd hands a and b one gradient tensor, and c a gradient of stride 0."""
    loss = ((params["a"] + params["b"]) * batch["x"]).sum() + params["c"].sum()
    return loss, torch.tensor(batch["x"].numel())


def test_gradients_that_share_memory_accumulate_right():
    params = {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(3), "unused": torch.ones(2)}
    batch = {"x": torch.arange(12.0).view(4, 3)}
    optimizer = optim.sgd(1.0)
    new, _ = make_train_step(shares_gradients, optimizer, micro_batches=4)(init_state(params, optimizer), batch)
    for name in ("a", "b"):
        assert torch.allclose(new.params[name], -batch["x"].sum(0) / 12)
    assert torch.allclose(new.params["c"], torch.full((3,), -4 / 12))
    assert torch.equal(new.params["unused"], torch.ones(2))


def test_a_loss_of_ones_own_learns():
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    truth = torch.tensor([1.0, -2.0, 0.5])
    batch = {"x": x, "y": x @ truth}

    def loss(params, batch):
        error = batch["x"] @ params["w"] + params["b"] - batch["y"]
        return error.square().sum(), len(error)

    optimizer = optim.adamw(0.1, weight_decay=0.0)
    step = make_train_step(loss, optimizer, donate=True)
    state = init_state({"w": torch.zeros(3), "b": torch.zeros(())}, optimizer)
    for _ in range(200):
        state, metrics = step(state, batch)
    assert metrics["loss"] < 1e-4 and torch.allclose(state.params["w"], truth, atol=1e-2)
    total, count = make_eval_step(loss)(state, batch)
    assert total < 64 * 1e-4 and count == 64


def test_a_run_of_steps_is_a_loop_written_by_hand_with_torchs_adamw():
    optimizer, loss = adamw(), llama.make_model(CFG).loss
    step = make_train_step(loss, optimizer)
    state = start(optimizer)
    params = copied(state.params)
    leaves = [leaf.requires_grad_() for leaf in tree.leaves(params)]
    groups = [
        {"params": [p for p in leaves if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in leaves if p.ndim < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999))
    for i in range(6):
        state, metrics = step(state, batch_of(i))
        total, count = loss(params, batch_of(i))
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        assert norm > 1.0, "clipping is not active: the test proves less"
        theirs.step()
        theirs.zero_grad()
        assert metrics["loss"].item() == pytest.approx((total / count).item(), rel=1e-5)
        assert metrics["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-4)
    check_close(state.params, tree.map(lambda p: p.detach(), params), 1e-4)


def test_bf16_compute_keeps_parameters_and_moments_in_fp32():
    optimizer = adamw()
    step = make_train_step(llama.make_model(CFG, Execution(compute_dtype=torch.bfloat16)).loss, optimizer, donate=True)
    exact = make_train_step(llama.make_model(CFG).loss, optimizer)
    _, expected = exact(start(optimizer), batch_of())
    state, metrics = step(start(optimizer), batch_of())
    assert metrics["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-2)
    assert metrics["grad_norm"].item() == pytest.approx(expected["grad_norm"].item(), rel=3e-2)
    assert {leaf.dtype for leaf in tree.leaves((state.params, state.opt_state)) if isinstance(leaf, torch.Tensor)} == {
        torch.float32
    }


# --- batches at the edge -----------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_batch_in_which_nothing_counts_is_a_gradient_of_zero(micro_batches):
    optimizer = adamw(weight_decay=0.0)
    step = make_train_step(llama.make_model(CFG).loss, optimizer, micro_batches=micro_batches)
    state = start(optimizer)
    new, metrics = step(state, batch_of(valid=(0, 0, 0, 0)))
    assert (metrics["loss"], metrics["grad_norm"], metrics["tokens"]) == (0, 0, 0)
    check_bitwise(new.params, state.params)


def test_a_micro_batch_in_which_nothing_counts_adds_nothing():
    optimizer, loss = optim.sgd(1.0), llama.make_model(CFG).loss
    both, metrics = make_train_step(loss, optimizer, micro_batches=2)(start(optimizer), batch_of(valid=(3, 16, 0, 0)))
    first = {key: value[:2] for key, value in batch_of(valid=(3, 16, 0, 0)).items()}
    alone, alone_metrics = make_train_step(loss, optimizer)(start(optimizer), first)
    check_bitwise(both.params, alone.params)
    check_bitwise(metrics, alone_metrics)


def test_a_batch_that_does_not_divide_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="4 sequences.*3 micro-batches"):
        split(batch_of(), 3)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_is_not_finite_can_be_left_out(bad):
    batch = {"x": torch.tensor([[1.0, bad]]), "counts": torch.ones(1, 2)}
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1))
    for donate in (False, True):
        step = make_train_step(weighted, optimizer, donate=donate, skip_nonfinite=True)
        state = init_state({"w": torch.ones(2)}, optimizer)
        before = copied(state)
        state, metrics = step(state, batch)
        assert not metrics["grad_norm"].isfinite()
        check_bitwise(state, before._replace(step=1))
        state, _ = step(state, batch | {"x": torch.ones(1, 2)})
        assert state.step == 2 and (state.params["w"] < 1).all()
    kept, metrics = make_train_step(weighted, optimizer)(before, batch)
    assert not metrics["grad_norm"].isfinite() and not kept.params["w"].isfinite().all()


def test_evaluation_sums_tokens_whatever_the_batch():
    evaluate = make_eval_step(llama.make_model(CFG).loss)
    state, batch = start(adamw()), batch_of()
    total, count = evaluate(state, batch)
    parts = [evaluate(state, piece) for piece in split(batch, 4)]
    assert total.dtype == torch.float64 and not total.requires_grad
    assert count == sum(part[1] for part in parts) == 27
    assert total.item() == pytest.approx(sum(part[0] for part in parts).item(), rel=1e-6)


# --- dials that change no number ---------------------------------------------------------------------------


def series(steps=3, micro_batches=1, **options):
    """The losses and norms of some steps, and the parameters after them."""
    optimizer = adamw()
    step = make_train_step(llama.make_model(CFG, Execution(**options)).loss, optimizer, micro_batches=micro_batches)
    state, seen = start(optimizer), []
    for i in range(steps):
        state, metrics = step(state, batch_of(i))
        seen.append([metrics["loss"].item(), metrics["grad_norm"].item()])
    return {"metrics": seen, "params": state.params}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("remat", ["full", 0.5])
def test_remat_changes_no_bit_of_a_run(remat, micro_batches):
    check_bitwise(series(remat=remat, micro_batches=micro_batches), series(micro_batches=micro_batches))


def test_a_compiled_run_with_remat_and_accumulation_is_the_plain_one():
    got, expected = series(compile=True, remat=0.5, micro_batches=2), series()
    check_close(got["metrics"], expected["metrics"])
    check_close(got["params"], expected["params"], 1e-3)  # AdamW makes much of gradients that are nearly 0


class Casts(TorchDispatchMode):
    """Counts the casts of float32 to bfloat16 by shape."""

    def __init__(self):
        super().__init__()
        self.shapes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32 != result.dtype:
            self.shapes[tuple(args[0].shape)] += 1
        return result


@pytest.mark.parametrize("kept", [True, False])
def test_weights_that_are_kept_are_cast_once_a_step(kept):
    options = ("precision.compute=bfloat16", f"parallel.reshard_after_forward={str(not kept).lower()}")
    run = tiny_run(*options, "train.micro_batch_size=1")
    with Casts() as casts:
        state, metrics = run.step(run.init(), run.batch(0))
    up = (CFG.ffn_dim, CFG.dim)  # of two weights in every layer; else cast for every forward and every backward
    assert casts.shapes[up] == 2 * CFG.n_layers * (1 if kept else 4 * 2)
    _, expected = tiny_run(*options[:1]).step(run.init(), run.batch(0))
    check_close(metrics["grad_norm"], expected["grad_norm"], 1e-2)
    assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(state.params))


# --- long runs ---------------------------------------------------------------------------------------------

TINY = (
    *(f"model.{name}={value}" for name, value in vars(CFG).items() if name not in ("rope_scaling", "norm_eps")),
    "data.source=synthetic",
    "data.seq_len=16",
    "data.global_batch_size=4",
    "precision.compute=float32",
    "fp8.recipe=none",
    "optimizer.lr=1e-2",
    "train.micro_batch_size=2",
)


def tiny_run(*overrides):
    return Run(load_recipe("debug", (*(o.replace("=False", "=false") for o in TINY), *overrides)), device="cpu")


def live_tensors():
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def rss():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size,steps", [(4, 400), (2, 200)])
def test_nothing_piles_up_over_a_run(micro_batch_size, steps):
    run = tiny_run("train.compile=false", f"train.steps={steps}", f"train.micro_batch_size={micro_batch_size}")
    state, log, seen = run.init(), [], {}
    while state.step < steps:
        state, metrics = run.step(state, run.batch(state.step))
        log.append({key: float(value) for key, value in metrics.items()})
        if state.step % 50 == 0:
            log[-1]["validation_loss"] = run.evaluate(state)[0]
        if state.step in (100, steps):
            del metrics
            seen[state.step] = live_tensors(), rss()
    assert seen[steps][0] == seen[100][0], "tensors pile up"
    assert seen[steps][1] - seen[100][1] < 5 << 20, "memory grows"


def test_a_run_compiles_in_its_first_step_and_first_validation_only():
    torch._dynamo.reset()
    counters.clear()
    run = tiny_run("train.compile=true", "train.steps=20", "schedule.warmup_steps=5", "validation.sequences=5")
    eager = tiny_run("train.compile=false", "train.steps=20", "schedule.warmup_steps=5", "validation.sequences=5")
    state, expected, graphs, rates = run.init(), eager.init(), {}, set()
    for i in range(20):
        state, metrics = run.step(state, run.batch(i))
        expected, eager_metrics = eager.step(expected, eager.batch(i))
        rates.add(metrics["lr"])
        tolerance = 1e-5 if i < 5 else 1e-3  # rounding grows along a trajectory
        assert metrics["loss"].item() == pytest.approx(eager_metrics["loss"].item(), rel=tolerance)
        if i + 1 in (10, 20):  # 5 sequences by 2: the last batch is short
            losses = run.evaluate(state), eager.evaluate(expected)
            assert losses[0][1] == losses[1][1] == 5 * 16
            assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-3)
        graphs[i + 1] = counters["stats"]["unique_graphs"]
    assert len(rates) == 20
    assert graphs[1] == 2, "the block and the loss are one graph each, whatever the depth"
    assert graphs[9] == graphs[1], "a step compiled again"
    assert graphs[10] <= graphs[9] + 2, "validation compiles the block and the loss once more, without gradients"
    assert graphs[20] == graphs[10], "the second half compiled again"
    assert not counters["recompiles"] and not counters["graph_break"]
