"""fp8 at its edges, through the whole step: zeros, what is not finite, and settings that cannot work."""

import math
import sys

import pytest
import steps
import torch
from click.testing import CliRunner
from steps import RECIPES, losses, on

from ftrain import Run, load_recipe, make_train_step
from ftrain.cli import main
from ftrain.execution import Execution
from ftrain.fp8 import Fp8, parse
from ftrain.launch import World
from ftrain.models import llama
from ftrain.recipe import RecipeError
from ftrain.sharding import MeshShape

LAYOUTS = ["one rank", "shard 2", "tensor 2"]


def zero_outputs(path, value):
    if path == "output" or path.endswith((".wo", ".w_down")):
        value.zero_()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_of_zeros_give_the_loss_of_guessing_and_a_finite_norm(ranks, layout, name):
    """The output matrix and those that write to the residual stream; they learn from the second step on."""
    for seen in on(ranks, layout, losses, f"fp8.recipe={name}", steps=3, edit=zero_outputs):
        assert seen[0][0] == pytest.approx(math.log(60), abs=1e-6)
        assert all(math.isfinite(loss) and 0 < norm < 100 for loss, norm in seen)
        assert seen[2][0] < seen[0][0]


def _spoil(path, value, where, bad):
    if path == where:
        value.view(-1)[-1] = bad


def _spoilt(rank, world, overrides, where, bad):
    """(loss, norm) of a step from a state with one value that is not finite, which the last rank holds."""
    run = steps.make_run(rank, world, overrides)
    state = steps.start(run, _spoil, where, float(bad))
    _, metrics = run.step(state, run.batch(0))
    return metrics["loss"].item(), metrics["grad_norm"].item()


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_finite_in_a_weight_or_an_activation_reaches_every_ranks_numbers(ranks, layout, name, bad):
    """A norm's weight makes every activation after it not finite; so does one value of a matrix."""
    for where in ("layers.1.w_up", "layers.0.wo", "output", "layers.1.mlp_norm"):
        for loss, norm in on(ranks, layout, _spoilt, f"fp8.recipe={name}", where=where, bad=bad):
            assert not math.isfinite(loss) and not math.isfinite(norm), where


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(x, bad):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.bad = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.bad, None


def _spoilt_gradient(rank, world, overrides, bad):
    """(loss, norm) of a step whose last rank's gradient is not finite, and of the step after it."""
    run = steps.make_run(rank, world, overrides)

    def loss(params, batch, **known):
        total, count = run.model.loss(params, batch, **known)
        return _Spoil.apply(total, float(bad) if rank == world - 1 else 1.0), count

    spoilt = make_train_step(
        loss, run.optimizer, run.post, mesh=run.mesh, plans=run.plans, micro_batches=run.micro_batches
    )
    state = run.init()
    new, metrics = spoilt(state, run.batch(0))
    # Histories take no such number in, so the parameters of before are trained on as if nothing had been.
    _, after = run.step(state._replace(fp8_state=new.fp8_state), run.batch(1))
    numbers = [after[key].item() for key in ("loss", "grad_norm")]
    return metrics["loss"].item(), metrics["grad_norm"].item(), numbers


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layout", ["one rank", "shard 2", "tensor 2"])
def test_a_gradient_that_is_not_finite_reaches_every_ranks_norm(ranks, layout, name, bad):
    for loss, norm, after in on(ranks, layout, _spoilt_gradient, f"fp8.recipe={name}", bad=bad):
        assert math.isfinite(loss) and not math.isfinite(norm)
        assert name != "delayed" or all(map(math.isfinite, after))


# --- settings ---


def problems(*overrides):
    with pytest.raises(RecipeError) as error:
        load_recipe("debug", (*steps.BASE, *overrides))
    return error.value.problems


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (['fp8.skip=["outptu"]'], ["fp8.skip", "'outptu'", "matches no weight", "layers.*.w_down", "output"]),
        (['fp8.skip=["embedding"]'], ["'embedding' matches no weight"]),
        (['fp8.skip=["*"]'], ["leaves no weight", "fp8.recipe"]),
        (["fp8.recipe=rowwise", "fp8.all_gather=true"], ["fp8.all_gather", "'rowwise'"]),
        (["fp8.recipe=rowwise_with_gw_hp", "fp8.precompute_scales=true"], ["fp8.precompute_scales"]),
        (["fp8.recipe=delayed", "fp8.precompute_scales=true"], ["nothing to precompute", "history"]),
        (["fp8.precompute_scales=false", "fp8.cache_shards=true"], ["fp8.cache_shards"]),
        (["fp8.all_gather=false", "fp8.cache_shards=true"], ["fp8.cache_shards", "fp8.all_gather"]),
        (["fp8.recipe=rowwise", "fp8.cache_shards=true"], ["fp8.cache_shards"]),
        (['fp8.recipe={output = "hihg"}'], ["fp8.recipe.output"]),
        (["fp8.recipe=blockwise", "parallel.tensor=2"], ["blockwise", "parallel.tensor"]),
    ],
)
def test_what_can_only_be_a_mistake_is_one_sentence_before_anything_runs(overrides, said):
    found = [problem for problem in problems(*overrides) if "fp8" in problem]
    assert any(all(word in problem for word in said) for problem in found), found


def test_every_command_gives_the_same_verdict():
    sets = [word for override in (*steps.BASE, 'fp8.skip=["outptu"]') for word in ("--set", override)]
    said = []
    for command in ("train", "validate", "inspect-sharding"):
        result = CliRunner().invoke(main, [command, "debug", *sets])
        assert result.exit_code == 2
        said.append(result.output)
    assert "'outptu' matches no weight" in said[0] and len(set(said)) == 1


def test_what_depends_on_the_device_is_told_by_the_run():
    recipe = load_recipe("debug", (*steps.BASE, "fp8.recipe=blockwise"))
    with pytest.raises(RecipeError, match="'blockwise' on 'cpu'"):
        Run(recipe, World(), "cpu")


def test_several_scales_a_weight_or_a_history_need_no_other_key():
    """Keys that are not given follow from the recipe, a user's own too."""
    for name, gathers, precomputes in (
        ("rowwise", False, False),
        ("delayed", True, False),
        ("tensorwise", True, True),
    ):
        for value in (name, f'{{base = "{name}"}}'):
            fp8 = load_recipe("debug", (*steps.BASE, f"fp8.recipe={value}")).fp8
            assert (fp8.all_gather, fp8.precompute_scales) == (gathers, precomputes)


# --- what is said at the start ---


def notes(mesh=None, device="cuda", tokens=64, compiled=True, vocab_size=2256, recipe="tensorwise", **options):
    cfg = llama.Config(vocab_size, dim=32, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=8, ffn_dim=40)
    declared = llama.abstract(cfg)
    fp8 = Fp8(parse(recipe), llama.product_weights(cfg), **options)
    return fp8.notes(declared, Execution().plans(declared), mesh or MeshShape(), device, tokens, compiled)


def said(lines, *words):
    return any(all(word in line for word in words) for line in lines)


def test_padding_is_of_the_local_shard_and_said_once_for_all_layers():
    assert not said(notes(), "output")  # 2256 = 141 * 16
    assert said(notes(MeshShape(tensor=2)), "pads output", "(1128, 32)", "(1136, 32)")
    assert said(notes(MeshShape(tensor=4), vocab_size=2560), "pads", "(10, 32)", "(16, 32)", "w_gate")
    assert not said(notes(MeshShape(tensor=4), vocab_size=2560), "output")
    assert said(notes(), "layers.*.w_gate, layers.*.w_up", "(40, 32)", "(48, 32)")
    assert said(notes(), "layers.*.w_down", "(32, 40)", "(32, 48)")
    assert not said(notes(skip=("layers.*.w_down",)), "w_down")
    assert said(notes(tokens=24), "24 tokens", "32") and not said(notes(tokens=32), "tokens")
    assert not said(notes(device="cpu"), "pads")


def test_flags_that_this_machine_gives_nothing_to_do_are_said():
    assert said(notes(), "one shard", "no weight travels")
    assert said(notes(MeshShape(shard=2)), "codes travel")
    assert said(notes(MeshShape(shard=2), precompute_scales=True, cache_shards=True), "scales and codes are made once")
    assert said(notes(MeshShape(shard=2), recipe="rowwise", all_gather=False), "cast on arrival")
    assert said(notes(compiled=False), "train.compile") and said(notes(device="cpu"), "on the CPU")
    assert notes(recipe="none") == []
    assert said(notes(skip=("output",)), "14 of 15 weights")


def test_a_run_says_them():
    assert said(steps.make_run(0, 1, ()).notes, "fp8 tensorwise: 15 of 15 weights")
    assert not said(steps.make_run(0, 1, ("fp8.recipe=none",)).notes, "fp8")


def test_fp8_needs_no_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)  # importing it now fails
    for name in RECIPES:
        ((loss, _),) = losses(0, 1, (f"fp8.recipe={name}",), 1)
        assert math.isfinite(loss)
