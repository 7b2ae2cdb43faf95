"""Qwen3 against transformers, on every layout, in fp8, and through the command line."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import pytest
import steps
import torch
from click.testing import CliRunner
from hf_models import LLAMA3, edit, logits_of, reopened, write_qwen3
from test_hf import load_and_save
from test_layouts import LAYOUTS, check_same, on_one_rank, one_step

from ftrain import generate, hf, tree
from ftrain.cli import main
from ftrain.models import llama, qwen3
from ftrain.report import as_json, inspect
from ftrain.sharding import MeshShape

TOKENS = torch.randint(0, 64, (2, 48), generator=torch.Generator().manual_seed(3))
SHAPES = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "num_key_value_heads": 1},
    "llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 1000000.0}, "rms_norm_eps": 1e-3},
}


def said(cfg, params):
    with torch.no_grad():
        return qwen3.make_model(cfg).logits(params, TOKENS)


# --- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_in_and_out(tmp_path, shape):
    model = write_qwen3(tmp_path / "a", **SHAPES[shape])
    cfg, params = hf.load(tmp_path / "a")
    assert isinstance(cfg, qwen3.Config) and cfg.head_dim * cfg.n_heads == 2 * cfg.dim
    expected = logits_of(model, TOKENS)
    assert expected.std() > 0.3  # a model that says the same everywhere would prove nothing
    torch.testing.assert_close(said(cfg, params), expected, atol=1e-4, rtol=0)
    hf.save(tmp_path / "b", params, cfg)
    assert torch.equal(logits_of(reopened(tmp_path / "b"), TOKENS), expected)


def test_a_model_of_other_depth_may_be_like_another(tmp_path):
    """What transformers writes once a layer is not carried along."""
    write_qwen3(tmp_path / "a", num_hidden_layers=3, max_position_embeddings=99)
    cfg, params = hf.load(tmp_path / "a")
    params["layers"].pop()
    cfg = replace(cfg, n_layers=2)
    hf.save(tmp_path / "b", params, cfg, like=tmp_path / "a")
    after = reopened(tmp_path / "b")
    assert after.config.max_position_embeddings == 99 and after.config.layer_types == ["full_attention"] * 2
    torch.testing.assert_close(said(cfg, params), logits_of(after, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients(tmp_path, shape):
    model = write_qwen3(tmp_path, **SHAPES[shape])
    labels = TOKENS.clone()
    labels[0, :7] = -100  # as transformers counts: positions that are not learnt from
    expected = model(TOKENS, labels=labels).loss
    expected.backward()
    cfg, params = hf.load(tmp_path)
    leaves, treedef = tree.flatten(params)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    batch = {"tokens": TOKENS[:, :-1], "targets": labels[:, 1:]}  # transformers shifts the labels, ftrain's data has
    total, count = qwen3.make_model(cfg).loss(tree.unflatten(treedef, leaves), batch)
    torch.testing.assert_close(total / count, expected, atol=1e-5, rtol=1e-5)
    theirs, form = dict(model.named_parameters()), hf.config.formats()["qwen3"]
    paths = tree.names(params)
    assert len(paths) == len(theirs)
    for path, gradient in zip(paths, torch.autograd.grad(total / count, leaves), strict=True):
        other = theirs[form.tensor(path)].grad
        assert other.abs().max() > 0
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-5, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.parametrize(("shape", "seed"), [("untied", 0), ("tied", 4)])
def test_greedy_text_is_the_same(tmp_path, shape, seed):
    model = write_qwen3(tmp_path, seed=seed, **SHAPES[shape])
    cfg, params = hf.load(tmp_path)
    prompt = TOKENS[0, :5].tolist()
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 5:].tolist()
    assert len(set(expected)) > 3
    assert generate(partial(qwen3.make_model(cfg).logits, params), prompt, 30, seq_len=64) == expected


# --- config.json ----------------------------------------------------------------------------------------------------

# hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, tie_word_embeddings, parameters
PUBLISHED = {
    "qwen3-0.6b": (1024, 28, 16, 3072, True, 596_049_920),
    "qwen3-1.7b": (2048, 28, 16, 6144, True, 1_720_574_976),
    "qwen3-4b": (2560, 36, 32, 9728, True, 4_022_468_096),
    "qwen3-8b": (4096, 36, 32, 12288, False, 8_190_735_360),
    "qwen3-14b": (5120, 40, 40, 17408, False, 14_768_307_200),
    "qwen3-32b": (5120, 64, 64, 25600, False, 32_762_123_264),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_of_a_published_model_is_its_preset(tmp_path, name):
    dim, layers, heads, ffn, tied, count = PUBLISHED[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": ffn,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    cfg = qwen3.PRESETS[name]
    assert hf.read_config(tmp_path) == hf.config.HfConfig("qwen3", cfg, config)
    assert sum(param.numel for param in tree.leaves(qwen3.abstract(cfg))) == count


def test_what_a_file_does_not_say_is_what_transformers_takes(tmp_path):
    model = write_qwen3(tmp_path, head_dim=128)
    optional = ("head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "attention_bias")
    edit(tmp_path, remove=(*optional, "hidden_act", "use_sliding_window", "layer_types", "architectures"))
    cfg, params = hf.load(tmp_path)
    assert cfg.head_dim == 128
    assert torch.equal(logits_of(reopened(tmp_path), TOKENS), logits_of(model, TOKENS))
    torch.testing.assert_close(said(cfg, params), logits_of(model, TOKENS), atol=1e-4, rtol=0)


REFUSED = {
    "use_sliding_window": (True, "use_sliding_window = true: ftrain's qwen3 has false there and nothing else"),
    "attention_dropout": (0.1, "attention_dropout = 0.1: ftrain's qwen3 has 0.0 there"),
    "hidden_act": ("gelu", 'hidden_act = "gelu": ftrain\'s qwen3 has "silu" there'),
    "rope_scaling": ({"rope_type": "yarn", "factor": 4.0}, 'rope_scaling.rope_type = "yarn": expected "default" or'),
    "attention_bias": (1, "attention_bias = 1: expected true or false"),
    "architectures": (["Qwen3MoeForCausalLM"], 'architectures = ["Qwen3MoeForCausalLM"]: expected one of Llama'),
    "model_type": ("qwen2", 'model_type = "qwen2"'),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_ftrain_does_not_do_is_refused_by_name(tmp_path, key):
    value, words = REFUSED[key]
    write_qwen3(tmp_path)
    edit(tmp_path, **{key: value})
    with pytest.raises(hf.HfError) as caught:
        hf.load(tmp_path)
    assert words in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)


# --- layouts --------------------------------------------------------------------------------------------------------

# Heads that are together wider than the model; over 4 shards the 6 elements of a head's norm are 2, 2, 2 and none.
ODD = qwen3.Config(vocab_size=60, dim=18, n_layers=3, n_heads=8, n_kv_heads=4, head_dim=6, ffn_dim=44)
BIASED = replace(ODD, tie_embeddings=True, attention_bias=True)
VARIANTS = {
    "uneven": (ODD, {}, ()),
    "all at once": (BIASED, {"remat": 0.5, "loss_chunks": 3}, (1, True)),
}


@pytest.mark.parametrize("name", ["shard 2", "shard 4", "replicate 2 x shard 2", "tensor 2", "shard 2 x tensor 2"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_computes_the_gradients_of_one_rank(ranks, name, variant):
    shape, (cfg, options, others) = LAYOUTS[name], VARIANTS[variant]
    expected = on_one_rank(cfg, documents=bool(others))
    results = ranks(shape.size, one_step, shape, cfg, options, *others)
    for result in results:
        assert result[1] == results[0][1], "ranks do not report the same numbers"
        check_same(result, expected)


@pytest.mark.parametrize("name", ["tensor 2", "shard 2 x tensor 2"])
def test_in_fp64_nothing_but_rounding_is_left(ranks, name):
    wide = {"compute_dtype": torch.float64, "reduce_dtype": torch.float64}
    expected = on_one_rank(BIASED, dtype=torch.float64)
    results = ranks(LAYOUTS[name].size, one_step, LAYOUTS[name], BIASED, wide, 3, False, torch.float64)
    for _, _, grads in results:
        for path, want in expected[2].items():
            assert np.linalg.norm(grads[path] - want) <= 1e-12 * np.linalg.norm(want), path


@pytest.mark.parametrize("name", ["tensor 2", "shard 2 x tensor 2"])
def test_any_layout_reads_and_writes_a_checkpoint(ranks, tmp_path, name):
    model = write_qwen3(tmp_path / "a", **SHAPES["biases"] | {"num_key_value_heads": 2})
    shape = LAYOUTS[name]
    _, params = hf.load(tmp_path / "a")
    for _, whole, _ in ranks(shape.size, load_and_save, vars(shape), tmp_path / "a", tmp_path / "b"):
        for (path, want), got in zip(tree.named_leaves(params), tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(got, want.numpy(), err_msg=path)
    assert torch.equal(logits_of(reopened(tmp_path / "b"), TOKENS), logits_of(model, TOKENS))


def test_initial_values_are_llamas_with_norms_of_one_and_biases_of_zero():
    params, plain = qwen3.init(BIASED, seed=3), dict(tree.named_leaves(llama.init(BIASED, seed=3)))
    for path, leaf in tree.named_leaves(params):
        constant = {"q_norm": 1.0, "k_norm": 1.0, "bq": 0.0, "bk": 0.0, "bv": 0.0, "bo": 0.0}.get(path.split(".")[-1])
        assert torch.equal(leaf, plain.pop(path) if constant is None else torch.full_like(leaf, constant)), path
    assert not plain


@pytest.mark.slow
def test_compiled_gradients_are_eager_ones():
    check_same(one_step(0, MeshShape(), BIASED, {"compile": True}), on_one_rank(BIASED))


# --- fp8 ------------------------------------------------------------------------------------------------------------


def test_products_are_llamas_and_norms_and_biases_are_none():
    cfg = replace(BIASED, tie_embeddings=False)
    chosen, plain = (
        {path for path in tree.names(model.abstract(cfg)) if any(fnmatchcase(path, g) for g in globs)}
        for model, globs in ((qwen3, qwen3.product_weights(cfg)), (llama, llama.product_weights(cfg)))
    )
    assert chosen == plain and "layers.0.wq" in chosen
    assert qwen3.flops_per_token(cfg, 64) == llama.flops_per_token(cfg, 64)


@pytest.mark.parametrize("layout", ["tensor 2", "shard 2 x tensor 2"])
def test_fp8_steps_are_those_of_one_rank(ranks, layout):
    preset = ("model.preset=qwen3-debug", "model.tie_embeddings=false", "model.attention_bias=true")
    (expected,) = steps.on(ranks, "one rank", steps.trace, *preset)
    (high,) = steps.on(ranks, "one rank", steps.trace, *preset, "fp8.recipe=none")
    assert {"layers.1.q_norm", "layers.0.bk"} <= expected[0][2].keys()
    assert steps.difference(expected, high) > 1e-3, "fp8 did not run"
    for found in steps.on(ranks, layout, steps.trace, *preset):
        assert steps.difference(found, expected) < 1e-3


def test_inspect_sharding_knows_what_is_split_and_what_runs_in_fp8():
    found = as_json(inspect("qwen3-8b", ("parallel.tensor=2", "model.n_layers=2"), world_size=8))
    assert (found["model"]["family"], found["model"]["head_dim"]) == ("qwen3", 128)
    rows = {row["path"]: row for row in found["parameters"]}
    norm, weight = rows["layers.0.q_norm"], rows["layers.0.wq"]
    assert (norm["stored"], norm["used"], norm["largest"]) == ([["shard"]], [[]], (32,))
    assert (norm["not_fp8"], norm["wire_dtype"]) == ("no weight of a product", "bfloat16")
    assert (weight["stored"], weight["used"], weight["largest"]) == (
        [["tensor", "shard"], []],
        [["tensor"], []],
        (512, 4096),
    )
    assert (weight["not_fp8"], weight["wire_dtype"]) == (None, "float8_e4m3fn")


# --- a run ----------------------------------------------------------------------------------------------------------


def test_a_recipe_trains_and_its_model_is_one_of_transformers(tmp_path):
    keys = ["train.steps=4", "data.seq_len=32", "data.source=synthetic", "train.micro_batch_size=8"]
    keys += ["checkpoint.export_hf=true", "validation.sequences=4", "precision.compute=float32"]
    words = [word for key in keys for word in ("--set", key)]
    result = CliRunner().invoke(main, ["train", "qwen3-debug", "--out", str(tmp_path / "run"), *words])
    assert result.exit_code == 0, result.output
    cfg, params = hf.load(tmp_path / "run" / "hf")
    assert cfg == qwen3.PRESETS["qwen3-debug"]
    assert not torch.equal(params["layers"][3]["k_norm"], torch.ones(64))
    torch.testing.assert_close(
        said(cfg, params), logits_of(reopened(tmp_path / "run" / "hf"), TOKENS), atol=1e-4, rtol=0
    )
