"""fp8 through the whole step: the same bits however scales are made, weights travel and ranks lie."""

from functools import partial

import numpy as np
import pytest
import steps
import torch
from steps import LAYOUTS, RECIPES, difference, on, same, trace

from ftrain.fp8.casts import cast_all, jobs
from ftrain.fp8.recipes import ROWWISE

MESHES = list(LAYOUTS)[1:]


@pytest.fixture(scope="module")
def traced(ranks):
    """`traced(layout, *overrides)`: the trace of rank 0, made once; all ranks must trace the same."""
    known = {}

    def of(layout, *overrides):
        key = (layout, *overrides)
        if key not in known:
            known[key], *others = on(ranks, layout, trace, *overrides)
            assert all(same(known[key], other) for other in others)
        return known[key]

    return of


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_made_after_the_step_or_in_it_and_cached_codes_give_the_same_bits(traced, layout):
    """Before the first step too: the first trace is of the state that `init` gives."""
    inline = traced(layout, "fp8.precompute_scales=false")
    assert same(traced(layout), inline)
    assert same(traced(layout, "fp8.cache_shards=true"), inline)


def test_scales_that_are_powers_of_two_are_so_whenever_they_are_made(traced):
    products = 'output={x="e4m3", w="e4m3 power_of_two"}, grad_input={g="e5m2", w="e4m3 power_of_two"}'
    recipe = f'fp8.recipe={{base="tensorwise", {products}}}'
    for layout in ("one rank", "shard 2"):
        assert same(traced(layout, recipe), traced(layout, recipe, "fp8.precompute_scales=false"))
    assert not same(traced("one rank", recipe), traced("one rank"))


@pytest.mark.parametrize("layout", ["shard 4", "shard 2 x tensor 2"])
def test_gather_then_cast_is_cast_then_gather(traced, layout):
    """Codes made on arrival from weights in their own dtype are those that would have travelled."""
    for precompute in ("true", "false"):
        late = ("fp8.all_gather=false", f"fp8.precompute_scales={precompute}")
        assert same(traced(layout, *late), traced(layout))
    bf16 = ("precision.compute=bfloat16", "precision.gather=params")
    early, late = traced(layout, *bf16), traced(layout, *bf16, "fp8.all_gather=false")
    assert early[0][0] == late[0][0]  # gradients are handed back in bfloat16 or float32, and so differ


@pytest.mark.parametrize("layout", MESHES)
def test_every_layout_is_one_rank(traced, layout):
    """FSDP's micro-batches are one rank's, and tensor-parallel scales are global: only sums are reordered."""
    assert difference(traced(layout), traced("one rank")) < 1e-5


@pytest.mark.parametrize("name", RECIPES[1:])
@pytest.mark.parametrize("layout", ["shard 4", "tensor 2", "shard 2 x tensor 2"])
def test_every_recipe_on_every_kind_of_layout(traced, layout, name):
    """Row-scaled products round to bfloat16, over `tensor` each partial sum: some codes are neighbours."""
    got, wanted = traced(layout, f"fp8.recipe={name}"), traced("one rank", f"fp8.recipe={name}")
    rounds = "tensor" in layout and "row" in name
    assert difference(got, wanted) < (0.1 if rounds else 1e-5)
    assert abs(got[0][0] - wanted[0][0]) < (1e-4 if rounds else 1e-5) * wanted[0][0]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layout", ["one rank", "shard 2 x tensor 2"])
def test_recomputation_changes_no_bit(traced, layout, name):
    for remat in ("full", "0.5"):
        again = traced(layout, f"fp8.recipe={name}", f"train.remat={remat}")
        assert same(again, traced(layout, f"fp8.recipe={name}"))


@pytest.mark.parametrize("option", ["parallel.reshard_after_forward=false", "train.loss_chunks=3"])
def test_kept_weights_and_a_loss_in_chunks(traced, option):
    """Chunks scale the head's input chunk by chunk: another cast, so only close."""
    a, b = traced("shard 2 x tensor 2", option), traced("shard 2 x tensor 2")
    assert same(a, b) if "reshard" in option else difference(a, b) < 0.1


@pytest.mark.parametrize("layout", ["one rank", "shard 4", "tensor 2"])
def test_a_tied_head_in_fp8_and_the_embedding_add_their_gradients(traced, ranks, layout):
    """Against two matrices that are equal: the embedding is looked up in high precision in both."""
    loss, _, tied = traced(layout, "model.tie_embeddings=true")[0]
    untied_loss, _, untied = on(ranks, layout, trace, steps=1, edit=partial(tie, {}))[0][0]
    assert loss == untied_loss
    wanted = untied["embedding"] + untied["output"]
    assert abs(tied["embedding"] - wanted).max() <= 1e-6 * abs(wanted).max()


def tie(seen, path, value):
    """An edit that makes the output matrix the embedding. seen: the values of the paths before."""
    seen[path] = value
    if path == "output":
        value.copy_(seen["embedding"])


def outlier(path, value):
    """In the last rank's half only: of rows (split by column) and of columns (split by row)."""
    if path in ("layers.0.w_up", "layers.1.w_down", "layers.0.wo"):
        value[-1, -1] = 50 * value.std()


@pytest.mark.parametrize("precompute", ["true", "false"])
def test_an_outlier_on_one_tensor_rank_scales_the_weight_on_all(ranks, precompute):
    options = (f"fp8.precompute_scales={precompute}",)
    wanted = on(ranks, "one rank", steps.losses, *options, steps=10, edit=outlier)[0]
    for got in on(ranks, "tensor 2", steps.losses, *options, steps=10, edit=outlier):
        assert abs(got[0][0] - wanted[0][0]) <= 1e-5 * wanted[0][0]
        assert abs(got[0][1] - wanted[0][1]) <= 1e-5 * wanted[0][1]
        for (loss, norm), (wanted_loss, wanted_norm) in zip(got, wanted, strict=True):
            assert abs(loss - wanted_loss) <= 0.01 * wanted_loss and abs(norm - wanted_norm) <= 0.05 * wanted_norm


def _scales(rank, world, overrides):
    run = steps.make_run(rank, world, overrides)
    weights = steps.start(run, outlier).fp8_state.weights
    return weights["layers"][0]["w_up"].scale.item(), weights["layers"][1]["w_down"].scale.item()


@pytest.mark.parametrize("layout", MESHES)
def test_a_scale_is_448_over_the_amax_of_the_whole_weight_on_every_rank(ranks, layout):
    (wanted,) = on(ranks, "one rank", _scales)
    amaxes = []
    run = steps.make_run(0, 1, ())
    steps.start(run, lambda path, value: (outlier(path, value), amaxes.append((path, value.abs().max().item()))))
    assert wanted[0] == pytest.approx(448 / dict(amaxes)["layers.0.w_up"], rel=1e-6)
    assert all(got == wanted for got in on(ranks, layout, _scales))


def _row_scales(rank, split):
    """The scales of rows of x (T, K) and w (N, K), made by a rank that holds its part of one of the dims."""
    group, n = (None, 1) if rank is None else (torch.distributed.group.WORLD, 2)
    scales = []
    for name, dims in (("x", "TK"), ("w", "NK")):
        whole = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
        whole[5, 11] = 50.0
        mine = whole.chunk(n, dims.index(split))[rank or 0] if split in dims else whole
        (codes,) = cast_all(jobs(mine, name, split, [("output", ROWWISE.output.left)]), group)
        scales.append(codes.scale)
    return [scale.flatten().numpy() for scale in scales]


def test_a_row_that_lies_on_two_ranks_has_one_scale_and_it_is_one_ranks(ranks):
    wanted = _row_scales(None, "")
    for got in ranks(2, _row_scales, "K"):
        assert all((a == b).all() for a, b in zip(got, wanted, strict=True))
    halves = ranks(2, _row_scales, "T")
    assert (np.concatenate([half[0] for half in halves]) == wanted[0]).all()


def test_vocabularies_that_are_no_multiple_of_16_on_a_rank(ranks):
    for vocab in (2256, 2556, 2560):
        options = (f"model.vocab_size={vocab}", "model.n_layers=1")
        (wanted,) = on(ranks, "one rank", steps.losses, *options, steps=2)
        for layout in ("tensor 2", "tensor 4"):
            for got in on(ranks, layout, steps.losses, *options, steps=2):
                for (loss, norm), (wanted_loss, wanted_norm) in zip(got, wanted, strict=True):
                    assert loss == pytest.approx(wanted_loss, rel=1e-5)
                    assert norm == pytest.approx(wanted_norm, rel=1e-4)


@pytest.mark.slow
def test_compiled_is_eager(traced):
    """Fused arithmetic rounds differently before a cast, and a code may be its neighbour's."""
    compiled = traced("one rank", "train.compile=true")
    assert difference(compiled, traced("one rank")) < 0.02
    assert same(traced("one rank", "train.compile=true", "fp8.precompute_scales=false"), compiled)
