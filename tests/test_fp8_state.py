"""Histories and scales as state: they move once a step, in every layout, and survive a checkpoint."""

import numpy as np
import pytest
import steps
import torch
from steps import LAYOUTS, RECIPES, on

from ftrain import checkpoint, load_recipe, make_train_step, tree
from ftrain.launch import World
from ftrain.sharding import full, to_local
from ftrain.step import stored
from ftrain.trainer import train

DELAYED = "fp8.recipe=delayed"
SHARES_INPUT = ("wk", "wv", "w_up")  # one cast serves q, k and v: its history is wq's


def histories(rank, world, overrides, n_steps=2):
    """After each step, path -> (3, 16): the latest amaxes of x, w and g."""
    run = steps.make_run(rank, world, overrides)
    state, seen = run.init(), []
    for i in range(n_steps):
        state, _ = run.step(state, run.batch(i))
        seen.append({path: leaf.numpy() for path, leaf in tree.named_leaves(state.fp8_state.history)})
    return seen


def test_a_history_moves_once_a_step_by_the_largest_amax_of_the_micro_batches():
    run = steps.make_run(0, 1, (DELAYED,))
    assert run.micro_batches == 4
    state, batch = run.init(), run.batch(0)
    options = {"mesh": run.mesh, "plans": run.plans}
    single = make_train_step(run.model.loss, run.optimizer, run.post, **options)
    parts = [single(state, {k: v[i : i + 1] for k, v in batch.items()})[0] for i in range(4)]
    whole, _ = make_train_step(run.model.loss, run.optimizer, run.post, micro_batches=4, **options)(state, batch)
    for path, new in tree.named_leaves(whole.fp8_state.history):
        old = dict(tree.named_leaves(state.fp8_state.history))[path]
        assert torch.equal(new[:, 1:], old[:, :-1])
        for row in (0, 2):  # x and g; the scale of w is of the parameters that the step made
            seen = torch.stack([dict(tree.named_leaves(p.fp8_state.history))[path][row, 0] for p in parts])
            # A micro-batch alone has another token count, but its loss is a sum: the same gradient.
            assert new[row, 0] == seen.max()
            assert len(seen.unique()) > 1 or (row == 0 and path.endswith(SHARES_INPUT))
        assert new[1, 0] == dict(tree.named_leaves(whole.params))[path].abs().max()


def test_scales_of_a_step_are_those_of_the_histories_before_it():
    run = steps.make_run(0, 1, (DELAYED,))
    state = run.init()
    assert state.fp8_state.weights["output"].x.scale is None  # nothing was seen: the first step scales itself
    for i in range(3):
        state, _ = run.step(state, run.batch(i))
        for path, history in tree.named_leaves(state.fp8_state.history):
            known = dict(tree.named_leaves(state.fp8_state.weights))
            x, w, g = history.amax(dim=1).double()
            assert known[f"{path}.scale"] == (448 / w).float()
            assert known[f"{path}.g.scale"] == (57344 / g).float()
            if not path.endswith(SHARES_INPUT):
                assert known[f"{path}.x.scale"] == (448 / x).float()


def test_neither_recomputation_nor_validation_moves_a_history(ranks):
    wanted = histories(0, 1, (DELAYED,))
    for remat in ("full", "0.5"):
        for got, step in zip(histories(0, 1, (DELAYED, f"train.remat={remat}")), wanted, strict=True):
            assert all(np.array_equal(got[path], step[path]) for path in step)
    run = steps.make_run(0, 1, (DELAYED, "validation.sequences=4"))
    state, _ = run.step(run.init(), run.batch(0))
    before = [leaf.clone() for leaf in tree.leaves(state.fp8_state)]
    run.evaluate(state)
    run.generate(state, [1, 2], 2)
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves(state.fp8_state), strict=True))


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_histories_are_the_same_on_every_rank_and_layout(ranks, layout):
    wanted = histories(0, 1, (DELAYED,))
    first, *others = on(ranks, layout, histories, DELAYED)
    for step, (got, one) in enumerate(zip(first, wanted, strict=True)):
        for path in one:
            assert all(np.array_equal(got[path], other[step][path]) for other in others)
            np.testing.assert_allclose(got[path], one[path], rtol=1e-3 if step else 2e-5)


# --- checkpoints ---


def _train(rank, world, overrides, out, n_steps, resume="auto"):
    """Train to the end, as rank `rank` of the ranks that the test started."""
    recipe = _recipe(overrides, n_steps, resume)
    train(recipe, out=out, quiet=True, world=World(rank, world))
    torch.distributed.is_initialized() and torch.distributed.barrier()


def _recipe(overrides, n_steps=6, resume="auto"):
    more = (
        f"train.steps={n_steps}",
        "schedule.decay=none",
        f"checkpoint.resume={resume}",
        "checkpoint.every=3",
    )
    return load_recipe("debug", (*steps.BASE, *overrides, "validation.every=0", "validation.sequences=4", *more))


def _stored(path, overrides):
    """Every leaf of a checkpoint, on one rank."""
    run = steps.make_run(0, 1, overrides)
    state, _ = checkpoint.load(path, stored(run.init()))
    return tree.named_leaves(state)


@pytest.mark.parametrize("options", [(f"fp8.recipe={name}",) for name in RECIPES] + [("fp8.cache_shards=true",)])
@pytest.mark.parametrize("layout", ["one rank", "shard 2"])
def test_a_run_that_goes_on_is_the_run_that_was_not_interrupted(ranks, tmp_path, layout, options):
    straight, again = tmp_path / "straight", tmp_path / "again"
    on(ranks, layout, _train, *options, out=straight, n_steps=6)
    on(ranks, layout, _train, *options, out=again, n_steps=3)
    on(ranks, layout, _train, *options, out=again, n_steps=6)
    wanted, got = (_stored(out / "checkpoints" / "step-00000006", options) for out in (straight, again))
    for (path, a), (other, b) in zip(wanted, got, strict=True):
        assert path == other and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b), path
    names = checkpoint.schema(again / "checkpoints" / "step-00000006")
    kept = {name for name in names if name.startswith("fp8_state")}
    assert kept == {name for name in kept if name.startswith("fp8_state.history.")}  # nothing that is derived
    assert bool(kept) == (options == (DELAYED,))


def _resumed(rank, world, overrides, path):
    """The fp8 part of a state that was loaded: path -> numpy."""
    from ftrain import resume

    run = steps.make_run(rank, world, overrides)
    state, _ = resume.restore(run, path, run.init(), lambda line: None)
    leaves = tree.named_leaves(state.fp8_state)
    whole = dict(tree.named_leaves(full(state.params)))
    amaxes = {path: leaf.abs().max().item() for path, leaf in whole.items()}
    return {path: to_local(leaf).float().numpy() for path, leaf in leaves}, amaxes


@pytest.mark.parametrize("layout", ["one rank", "shard 4", "tensor 2", "shard 2 x tensor 2"])
def test_scales_are_right_after_a_load_into_any_layout(ranks, tmp_path, layout):
    _train(0, 1, (DELAYED,), tmp_path / "delayed", 3)
    _train(0, 1, ("fp8.cache_shards=true",), tmp_path / "dynamic", 3)
    for known, amaxes in on(ranks, layout, _resumed, path=tmp_path / "dynamic/checkpoints/step-00000003"):
        for path, amax in amaxes.items():
            if f"weights.{path}.scale" in known:
                assert known[f"weights.{path}.scale"] == np.float32(448 / np.float64(amax))
    (wanted, _), *_ = on(ranks, "one rank", _resumed, DELAYED, path=tmp_path / "delayed/checkpoints/step-00000003")
    for known, _ in on(ranks, layout, _resumed, DELAYED, path=tmp_path / "delayed/checkpoints/step-00000003"):
        assert all(np.array_equal(known[name], wanted[name]) for name in wanted)
        assert "weights.output.x.scale" in known


def test_what_a_checkpoint_lacks_begins_anew_and_is_said(tmp_path, capsys):
    for name, before, lacks in (("tensorwise", (), "15 of 15"), ("delayed", ('fp8.skip=["output"]',), "1 of 15")):
        out = tmp_path / name
        _train(0, 1, (f"fp8.recipe={name}", *before), out, 3)
        capsys.readouterr()
        train(_recipe((DELAYED,)), out=out)
        printed = capsys.readouterr().out
        assert f"lacks {lacks} fp8 histories of this recipe: all of them begin anew" in printed
    train(_recipe(("fp8.recipe=none",), 9), out=out)
    printed = capsys.readouterr().out
    assert "fp8.recipe was 'delayed' and is 'none'" in printed and "histories are not used" in printed
