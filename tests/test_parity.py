"""validate --parity: recipes that compute right pass, broken ones fail with a sentence that says why."""

import json
import math

import pytest
import steps
import torch
from click.testing import CliRunner
from steps import RECIPES, on

from ftrain import load_recipe, tree
from ftrain.cli import main
from ftrain.launch import World
from ftrain.parity import compare, parity, text
from ftrain.trainer import train

# Wide enough that a gradient is a sum of many roundings.
WIDE = (
    "model.vocab_size=272",
    *(f"model.{key}={value}" for key, value in {"dim": 64, "head_dim": 16, "ffn_dim": 192}.items()),
)


def recipe_of(*overrides):
    return load_recipe("debug", (*steps.BASE, *WIDE, *overrides))


def noise(result):
    return [1e3 if gradient["sqnr"] == "same" else gradient["sqnr"] for gradient in result["gradients"]]


def _parity(rank, world, overrides, checkpoint=None):
    return parity(recipe_of(*overrides), world=World(rank, world), checkpoint=checkpoint)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layout", ["one rank", "shard 2 x tensor 2"])
def test_recipes_pass_and_every_rank_says_the_same(ranks, layout, name):
    first, *others = on(ranks, layout, _parity, f"fp8.recipe={name}", "precision.compute=bfloat16")
    assert first["passed"] and first["failures"] == [] and all(other == first for other in others)
    found = noise(first)
    assert 15 < found[0] < 22 and found == sorted(found) and len(found) == 2 * 9 + 3
    # Of each weight itself and its output gradient, and of each input: q, k and v share one, gate and up too.
    assert len(first["casts"]) == 2 * (2 * 7 + 1) + 2 * 4 + 1
    assert all(cast["saturated"] == 0 and cast["flushed"] < 0.05 for cast in first["casts"])


def test_without_fp8_only_the_order_of_sums_and_bfloat16_differ(ranks):
    exact = _parity(0, 1, ("fp8.recipe=none",))
    assert exact["passed"] and exact["casts"] == [] and exact["loss"] == exact["reference_loss"]
    assert all(gradient["sqnr"] == "same" for gradient in exact["gradients"])
    sharded = on(ranks, "shard 2 x tensor 2", _parity, "fp8.recipe=none")[0]
    assert sharded["passed"] and min(noise(sharded)) > 100
    bf16 = _parity(0, 1, ("fp8.recipe=none", "precision.compute=bfloat16"))
    assert bf16["passed"] and 30 < bf16["gradients"][0]["sqnr"] < 60


@pytest.mark.parametrize("option", ["train.remat=full", "train.loss_chunks=2", "parallel.reshard_after_forward=false"])
def test_the_recipe_as_written(ranks, option):
    result = on(ranks, "shard 2", _parity, option)[0]
    assert result["passed"], text(result)


def _cli(*overrides, options=()):
    sets = [word for override in (*steps.BASE, *WIDE, *overrides) for word in ("--set", override)]
    return CliRunner().invoke(main, ["validate", "debug", "--parity", *options, *sets])


def test_gradients_in_a_format_without_their_range_fail():
    """The head's is near -1 at the target and 1 / vocabulary elsewhere: e4m3 has no codes for both."""
    huge = ("model.vocab_size=500000", "model.dim=16", "model.n_layers=1", "data.global_batch_size=1")
    narrow = '{base="tensorwise", grad_input={g="e4m3", w="e4m3"}, grad_weight={g="e4m3", x="e4m3"}}'
    broken = _cli(*huge, f"fp8.recipe={narrow}")
    assert broken.exit_code == 1 and "FAILED" in broken.output
    assert "casts flush to zero more than" in broken.output and "worst g of output with 87" in broken.output
    assert "gradients have less than 10 dB, the worst norm" in broken.output
    fine = _cli(*huge)
    assert fine.exit_code == 0 and "passed" in fine.output, fine.output


def test_histories_that_do_not_fit_the_values_fail(tmp_path):
    """Scales that are 64 times too large, as from the histories of another model: casts saturate."""
    run = steps.make_run(0, 1, (*WIDE, "fp8.recipe=delayed"))
    state, _ = run.step(run.init(), run.batch(0))
    fine = compare(run, state)
    assert fine["passed"], fine["failures"]
    known = state.fp8_state.weights
    large = tree.map_named(lambda path, leaf: leaf * 64 if path.endswith(".x.scale") else leaf, known)
    broken = compare(run, state._replace(fp8_state=state.fp8_state._replace(weights=large)))
    assert not broken["passed"] and broken["casts"][0]["saturated"] > 0.1
    assert any("saturate more than" in failure for failure in broken["failures"])
    assert any("gradients have less than" in failure for failure in broken["failures"])


def test_what_is_not_finite_fails():
    def spoil(path, value):
        if path == "layers.0.wq":
            value[0, 0] = math.nan

    run = steps.make_run(0, 1, WIDE)
    result = compare(run, steps.start(run, spoil))
    assert not result["passed"] and len(result["failures"]) >= 2
    printed = text({**result, "step": 0, "checkpoint": None})
    assert "FAILED" in printed and "not finite  layers" in printed


def test_gradients_that_are_zero_in_both_are_the_same():
    def zero(path, value):
        if path == "output":
            value.zero_()

    run = steps.make_run(0, 1, WIDE)
    result = compare(run, steps.start(run, zero))
    assert result["passed"] and {g["path"]: g["sqnr"] for g in result["gradients"]}["layers.0.wq"] == "same"


def test_a_checkpoint_and_json(tmp_path):
    small = ("train.steps=3", "validation.sequences=4", "fp8.recipe=delayed")
    train(recipe_of(*small), out=tmp_path, quiet=True)
    result = _cli(*small, options=("--json", "--checkpoint", str(tmp_path)))
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert found["passed"] and found["step"] == 3 and "step-00000003" in found["checkpoint"]
    assert set(found["bars"]) == {"loss", "gradient", "saturated", "flushed"}
    assert torch.tensor([gradient["sqnr"] for gradient in found["gradients"]]).isfinite().all()
