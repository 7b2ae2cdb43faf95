"""Checkpoints of Hugging Face against transformers: the same logits, losses and gradients, in and out."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch
from hf_models import LLAMA3, T0, edit, logits_of, reopened, write_llama
from safetensors.torch import load_file, save_file

import ftrain
from ftrain import hf, tree
from ftrain.execution import Execution
from ftrain.models import llama
from ftrain.nn import rope_frequencies
from ftrain.sampling import generate
from ftrain.sharding import full, make_mesh

TOKENS = torch.randint(0, 64, (2, 96), generator=torch.Generator().manual_seed(3))

SHAPES = {
    "each head its own keys": {"num_key_value_heads": 4},
    "8 heads, 2 for keys": {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2},
    "one for keys": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "6 heads, 3 for keys": {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3},
    "wide heads": {"head_dim": 16},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}, "rms_norm_eps": 1e-5},
    "llama3, tied": {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "tie_word_embeddings": True},
    "deep": {"num_hidden_layers": 5},
}


def said(cfg, params, tokens=TOKENS):
    with torch.no_grad():
        return llama.make_model(cfg).logits(params, tokens)


def stored(folder):
    """Every tensor in the files of a checkpoint, by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_tensors(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_in_and_out(tmp_path, shape):
    model = write_llama(tmp_path / "a", **SHAPES[shape])
    cfg, params = hf.load(tmp_path / "a")
    expected = logits_of(model, TOKENS)
    assert expected.std() > 0.3  # a model that says the same everywhere would prove nothing
    torch.testing.assert_close(said(cfg, params), expected, atol=1e-4, rtol=0)
    hf.save(tmp_path / "b", params, cfg)
    assert torch.equal(logits_of(reopened(tmp_path / "b"), TOKENS), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_round_trip_changes_no_bit(tmp_path, dtype):
    write_llama(tmp_path / "a", dtype)
    cfg, params = hf.load(tmp_path / "a")
    assert {leaf.dtype for leaf in tree.leaves(params)} == {dtype}
    hf.save(tmp_path / "b", params, cfg, like=tmp_path / "a", shard_bytes=5000)
    assert_same_tensors(stored(tmp_path / "b"), stored(tmp_path / "a"))
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert {key: after[key] for key in before if key != "transformers_version"} == {
        key: value for key, value in before.items() if key != "transformers_version"
    }
    # Through float32, where training keeps it, and back.
    cfg, params = hf.load(tmp_path / "a", dtype=torch.float32)
    assert {leaf.dtype for leaf in tree.leaves(params)} == {torch.float32}
    hf.save(tmp_path / "c", params, cfg, dtype=dtype)
    assert_same_tensors(stored(tmp_path / "c"), stored(tmp_path / "a"))


@pytest.mark.parametrize("shape", ["8 heads, 2 for keys", "llama3, tied"])
def test_loss_and_gradients(tmp_path, shape):
    model = write_llama(tmp_path / "a", **SHAPES[shape])
    labels = TOKENS.clone()
    labels[0, :7] = -100  # as transformers counts: positions that are not learnt from
    expected = model(TOKENS, labels=labels).loss
    expected.backward()

    cfg, params = hf.load(tmp_path / "a")
    leaves, treedef = tree.flatten(params)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    batch = {"tokens": TOKENS[:, :-1], "targets": labels[:, 1:]}  # transformers shifts the labels, ftrain's data has
    total, count = llama.make_model(cfg).loss(tree.unflatten(treedef, leaves), batch)
    loss = total / count
    assert count == 2 * 95 - 6
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(loss, leaves)
    theirs = dict(model.named_parameters())
    form = hf.config.formats()["llama"]
    for path, gradient in zip(tree.names(params), gradients, strict=True):
        other = theirs[form.tensor(path)].grad
        assert other.abs().max() > 0
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-5, msg=lambda text, path=path: f"{path}: {text}")


def test_greedy_text_is_the_same(tmp_path):
    model = write_llama(tmp_path / "a", **SHAPES["8 heads, 2 for keys"])
    cfg, params = hf.load(tmp_path / "a")
    prompt = TOKENS[0, :5].tolist()
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 5:].tolist()
    assert len(set(expected)) > 3
    logits = partial(llama.make_model(cfg).logits, params)
    assert generate(logits, prompt, 40, seq_len=64) == expected
    assert ftrain.generate(logits, prompt, 40, seq_len=64) == expected


# --- what config.json says ------------------------------------------------------------------------------------------


def test_older_files_say_the_rotary_embedding_elsewhere(tmp_path):
    model = write_llama(tmp_path / "a", rope_parameters=LLAMA3 | {"rope_theta": 10000.0})
    edit(tmp_path / "a", remove=("rope_parameters", "head_dim"), rope_theta=10000.0, rope_scaling=LLAMA3)
    cfg, params = hf.load(tmp_path / "a")
    torch.testing.assert_close(said(cfg, params), logits_of(model, TOKENS), atol=1e-4, rtol=0)
    edit(tmp_path / "a", rope_scaling={"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()})
    assert hf.read_config(tmp_path / "a").cfg == cfg


def test_what_a_file_does_not_say_is_what_transformers_takes(tmp_path):
    model = write_llama(tmp_path / "a")
    optional = ("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "hidden_act", "attention_bias", "mlp_bias")
    edit(tmp_path / "a", remove=(*optional, "head_dim", "architectures"), num_key_value_heads=2)
    cfg, params = hf.load(tmp_path / "a")
    assert torch.equal(logits_of(reopened(tmp_path / "a"), TOKENS), logits_of(model, TOKENS))
    torch.testing.assert_close(said(cfg, params), logits_of(model, TOKENS), atol=1e-4, rtol=0)
    edit(tmp_path / "a", remove=("num_key_value_heads",))
    assert hf.read_config(tmp_path / "a").cfg.n_kv_heads == 4


def test_llama3_frequencies_go_in_and_out(tmp_path):
    rope = {"rope_theta": 10000.0, "rope_scaling": LLAMA3}
    write_llama(tmp_path / "a", head_dim=8)
    edit(tmp_path / "a", remove=("rope_parameters",), **rope)
    cfg, params = hf.load(tmp_path / "a")
    found = rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    np.testing.assert_allclose(found, [1.0, 0.013042256, 0.00125, 0.000125], rtol=1e-6)
    np.testing.assert_allclose(rope_frequencies(8, 10000.0), [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    hf.save(tmp_path / "b", params, cfg)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert {key: config[key] for key in rope} == rope and config["max_position_embeddings"] == 512
    np.testing.assert_allclose(reopened(tmp_path / "b").model.rotary_emb.inv_freq, found, rtol=1e-6)


REFUSED = {
    "attention_bias": (True, "attention_bias = true: ftrain's llama has false there and nothing else"),
    "mlp_bias": (True, "mlp_bias = true"),
    "hidden_act": ("gelu", 'hidden_act = "gelu"'),
    "attention_dropout": (0.1, "attention_dropout = 0.1"),
    "rope_scaling": ({"type": "linear", "factor": 2.0}, 'rope_scaling.rope_type = "linear": expected "default" or'),
    "rope_parameters": ({"rope_type": "yarn", "factor": 2.0}, 'rope_parameters.rope_type = "yarn"'),
    "rope_theta": (20000.0, "rope_parameters.rope_theta = 10000.0, but rope_theta = 20000.0"),
    "architectures": (["MistralForCausalLM"], 'architectures = ["MistralForCausalLM"]: expected one of LlamaForCaus'),
    "model_type": ("mistral", 'model_type = "mistral"'),
    "quantization_config": ({"quant_method": "fp8"}, "quantization_config: ftrain reads weights in float32, bfloat16"),
    "hidden_size": ("16", 'hidden_size = "16": expected a whole number above 0'),
    "num_hidden_layers": (0, "num_hidden_layers = 0: expected a whole number above 0"),
    "num_key_value_heads": (True, "num_key_value_heads = true: expected a whole number above 0"),
    "rms_norm_eps": (float("nan"), "rms_norm_eps = NaN: expected a number above 0"),
    "tie_word_embeddings": (1, "tie_word_embeddings = 1: expected true or false"),
    "vocab_size": (None, "it has no vocab_size"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_ftrain_does_not_do_is_refused_by_name(tmp_path, key):
    value, words = REFUSED[key]
    write_llama(tmp_path)
    edit(tmp_path, **{key: value})
    with pytest.raises(hf.HfError) as caught:
        hf.load(tmp_path)
    assert words in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"factor": None}, "rope_scaling has no factor"),
        ({"factor": 0}, "rope_scaling.factor = 0: expected a number above 0"),
        ({"attention_factor": 2.0}, "rope_scaling.attention_factor = 2.0: there is no such key for llama3"),
    ],
)
def test_every_number_of_llama3_is_looked_at(tmp_path, scaling, words):
    write_llama(tmp_path)
    said = {key: value for key, value in (LLAMA3 | scaling).items() if value is not None}
    edit(tmp_path, remove=("rope_parameters",), rope_scaling=said)
    with pytest.raises(hf.HfError, match=words):
        hf.load(tmp_path)
    edit(tmp_path, rope_scaling=LLAMA3, rope_parameters=LLAMA3 | {"factor": 4.0})
    with pytest.raises(hf.HfError, match="rope_scaling and rope_parameters say different things"):
        hf.load(tmp_path)


def test_all_reasons_come_together(tmp_path):
    write_llama(tmp_path)
    edit(tmp_path, mlp_bias=True, hidden_act="gelu", vocab_size=-1)
    with pytest.raises(hf.HfError) as caught:
        hf.load(tmp_path)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("text", ["", "[]", '"llama"', "{", "[" * 100000, '{"model_type": "llama", "x": \xff}'])
def test_a_config_that_is_no_config(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(hf.HfError, match="config.json"):
        hf.load(tmp_path)


def test_a_name_of_the_hub_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        hf.HfError, match="no such folder: a model of the Hugging Face hub is first downloaded: hf down"
    ):
        hf.load("meta-llama/Llama-3.1-8B")


# --- any layout -----------------------------------------------------------------------------------------------------


def load_and_save(rank, shape, source, target):
    mesh = make_mesh(ftrain.sharding.MeshShape(**shape))
    execution = Execution(mesh=mesh)
    cfg, params = hf.load(source, execution)
    local = sum(leaf.to_local().numel() for leaf in tree.leaves(params))
    hf.save(target, params, cfg, shard_bytes=5000)
    whole = tree.map(lambda leaf: leaf.numpy(), full(params))
    return dataclasses.asdict(cfg), whole, local


LAYOUTS = {"shard 2": (2, {"shard": 2}), "tensor 2": (2, {"tensor": 2}), "shard 3": (3, {"shard": 3})}
LAYOUTS |= {"both": (4, {"tensor": 2, "shard": 2}), "replicas": (4, {"replicate": 2, "shard": 2})}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_holds_the_same_values(ranks, tmp_path, layout):
    world, shape = LAYOUTS[layout]
    write_llama(tmp_path / "a", num_hidden_layers=1)
    cfg, params = hf.load(tmp_path / "a")
    expected = {path: leaf.numpy() for path, leaf in tree.named_leaves(params)}
    share = sum(leaf.size for leaf in expected.values()) / (world / shape.get("replicate", 1))
    for other, whole, local in ranks(world, load_and_save, shape, tmp_path / "a", tmp_path / "b"):
        assert other == dataclasses.asdict(cfg)
        for path, leaf in tree.named_leaves(whole):
            np.testing.assert_array_equal(leaf, expected[path], err_msg=path)
        assert local < 1.1 * share  # nobody holds what is another's, but for rows that do not divide
    assert_same_tensors(stored(tmp_path / "b"), stored(tmp_path / "a"))
    assert torch.equal(logits_of(reopened(tmp_path / "b"), TOKENS), logits_of(reopened(tmp_path / "a"), TOKENS))


def fail_together(rank, source, target):
    mesh = make_mesh(ftrain.sharding.MeshShape(shard=2))
    found = []
    for attempt in (
        lambda: hf.load(source / "tied", Execution(mesh=mesh)),
        lambda: hf.load(source / "short" if rank else source / "a", Execution(mesh=mesh)),
        lambda: hf.save(target, hf.load(source / "a", Execution(mesh=mesh)).params, llama.Config(**CFG)),
    ):
        try:
            attempt()
            found.append(None)
        except hf.HfError as error:
            found.append(str(error))
    return found


CFG = {"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "ffn_dim": 48}


def test_an_error_on_one_rank_is_one_on_all(ranks, tmp_path):
    write_llama(tmp_path / "a")
    write_llama(tmp_path / "short")
    path = tmp_path / "short" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "taken").write_text("a file")
    # A tied model whose second matrix differs from the first in a row that rank 1 has.
    head = write_llama(tmp_path / "tied", tie_word_embeddings=True).lm_head.weight.detach().clone()
    head[40, 3] += 1
    save_file(stored(tmp_path / "tied") | {"lm_head.weight": head}, tmp_path / "tied" / "model.safetensors")
    first, second = ranks(2, fail_together, tmp_path, tmp_path / "taken")
    assert first == second
    assert first[0].startswith("rank 1: ") and "lm_head.weight differs from model.embed_tokens.weight" in first[0]
    assert first[1].startswith("rank 1: ") and "model.safetensors" in first[1] and "cut short" in first[1]
    assert "taken is there already" in first[2]


def test_tied_and_untied_and_their_numbers(tmp_path):
    assert sum(p.numel for p in tree.leaves(llama.abstract(llama.Config(**CFG)))) == 8272
    for tied, count in [(False, 8272), (True, 7248)]:
        write_llama(tmp_path / str(tied), tie_word_embeddings=tied)
        _, params = hf.load(tmp_path / str(tied))
        assert sum(leaf.numel() for leaf in tree.leaves(params)) == count and T0["vocab_size"] == 64
