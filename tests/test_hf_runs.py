"""Recipes that start from a checkpoint of Hugging Face, and runs that end as one."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from hf_models import LLAMA3, edit, logits_of, reopened, write_llama
from test_data_tokenizers import byte_level

import ftrain
from ftrain import Run, checkpoint, hf, resume, tree
from ftrain.cli import main
from ftrain.launch import World
from ftrain.parity import gradients
from ftrain.recipe import RecipeError, dump, load_recipe, model_config
from ftrain.report import as_json, inspect
from ftrain.sharding import full, to_local
from ftrain.trainer import train, validate

TOKENS = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(3))
RECIPE = """
[model]
hf = "{hf}"
[data]
source = "synthetic"
seq_len = 16
global_batch_size = 4
[precision]
compute = "float32"
[optimizer]
lr = 1e-2
weight_decay = 0.0
[train]
steps = 3
seed = 7
micro_batch_size = 2
compile = false
[checkpoint]
every = 2
[validation]
every = 0
sequences = 4
"""


@pytest.fixture
def model(tmp_path):
    """`model(**keys)`: the path of a recipe that starts from a random T0 with these keys, which lies in hf/."""

    def make(**keys):
        write_llama(tmp_path / "hf", **keys)
        (tmp_path / "hf.toml").write_text(RECIPE.format(hf=tmp_path / "hf"))
        return str(tmp_path / "hf.toml")

    return make


def run_said(run, state):
    """The logits of a run's model on TOKENS, of one rank."""
    with torch.no_grad():
        return run.model.logits(to_local(state.params), TOKENS)


# --- a recipe --------------------------------------------------------------------------------------------------------


def test_the_shape_is_the_checkpoints(model, tmp_path):
    path = model(rope_parameters=LLAMA3 | {"rope_theta": 5000.0}, head_dim=8)
    recipe = load_recipe(path)
    assert model_config(recipe.model) == hf.read_config(tmp_path / "hf").cfg
    assert (recipe.model.family, recipe.model.dim, recipe.model.head_dim) == ("llama", 16, 8)
    (tmp_path / "again.toml").write_text(dump(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe
    state = Run(recipe).init()
    torch.testing.assert_close(
        run_said(Run(recipe), state), logits_of(reopened(tmp_path / "hf"), TOKENS), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.dim=32", "model.dim = 32, but the config.json of model.hf = "),
        ("model.n_layers=3", "says 2."),
        ("model.tie_embeddings=true", "model.tie_embeddings = true, but"),
        ("model.rope_theta=5e5", "model.rope_theta = 500000.0, but"),
        ('model.rope_scaling={type="llama3"}', "model.rope_scaling lacks"),
        ("model.preset=debug", 'model.preset = "debug", and the config.json of model.hf'),
        ("model.family=mamba", 'model.family = "mamba"'),
        ("model.hf=nowhere", 'model.hf = "nowhere": nowhere: there is no such folder'),
    ],
)
def test_a_recipe_that_contradicts_its_checkpoint(model, override, words):
    path = model()
    assert load_recipe(path, ["model.dim=16", "model.n_layers=2", "model.family=llama"])
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [override])
    assert words in str(caught.value)


def test_what_a_config_says_that_ftrain_does_not_do_is_a_problem_of_the_recipe(model, tmp_path):
    path = model()
    edit(tmp_path / "hf", mlp_bias=True, hidden_act="gelu")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert len(caught.value.problems) == 2 and all("model.hf = " in line for line in caught.value.problems)


def test_its_tokenizer_is_the_checkpoints_unless_another_is_named(model, tmp_path):
    path = model()
    assert load_recipe(path).data.tokenizer == "bytes"
    byte_level(tmp_path / "hf" / "tokenizer.json", ["</s>"])
    assert load_recipe(path).data.tokenizer == str(tmp_path / "hf" / "tokenizer.json")
    assert load_recipe(path, ["data.tokenizer=bytes"]).data.tokenizer == "bytes"


def test_it_can_be_inspected(model):
    found = as_json(inspect(model(num_hidden_layers=5), world_size=2))
    assert found["model"]["n_layers"] == 5 and found["model"]["parameters"] == 2 * 1024 + 16 + 5 * 3104


# --- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_starts_from_the_weights_and_goes_on_from_its_own(model, tmp_path, capsys):
    path, out = model(), tmp_path / "out"
    theirs = reopened(tmp_path / "hf")
    run = Run(load_recipe(path))
    batch = run.batch(0)
    expected = torch.nn.functional.cross_entropy(
        logits_of(theirs, batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
    )
    train(load_recipe(path, ["train.steps=2"]), out=out)
    printed = capsys.readouterr().out
    assert f"the run starts from the weights of model.hf='{tmp_path / 'hf'}', float32\n" in printed
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] == pytest.approx(expected.item(), abs=1e-5)
    # Now there are two places to start from; the weights need not even be there any more.
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert train(load_recipe(path), out=out)["step"] == 3
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "model.hf" in line]
    assert line.startswith(
        f"the run goes on from {out / 'checkpoints' / 'step-00000002'}; model.hf='{tmp_path / 'hf'}'"
    )
    with pytest.raises(hf.HfError, match="has neither model.safetensors"):
        train(load_recipe(path), out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_rounding_is_said(model, tmp_path, capsys):
    train(load_recipe(model(), ["precision.params=bfloat16"]))
    assert "float32, rounded to bfloat16\n" in capsys.readouterr().out


def test_validate_without_a_checkpoint_is_of_the_weights(model, tmp_path):
    path = model()
    result = validate(load_recipe(path))
    run = Run(load_recipe(path))
    batch = run.data.validation.batch(0, 4)
    expected = torch.nn.functional.cross_entropy(
        logits_of(reopened(tmp_path / "hf"), batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
    )
    assert result["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert result["checkpoint"] == str(tmp_path / "hf")


# --- tied embeddings -------------------------------------------------------------------------------------------------


def tied_gradients(rank, world, path):
    """The gradients of the first batch and the parameters, whole, on every rank."""
    run = Run(load_recipe(path, [f"parallel.shard={world}"]), world=World(rank, world))
    state = run.init()
    grads, _ = gradients(run, state, run.batch(0))
    return [{name: leaf.numpy() for name, leaf in tree.named_leaves(full(part))} for part in (grads, state.params)]


def train_on(rank, world, path, out):
    summary = train(load_recipe(path, [f"parallel.shard={world}"]), out=out, quiet=True, world=World(rank, world))
    return summary["step"]


def test_a_tied_model_on_two_ranks(ranks, model, tmp_path):
    tied = model(tie_word_embeddings=True)
    untied = tmp_path / "untied"
    cfg, params = hf.load(tmp_path / "hf")
    hf.save(
        untied,
        params | {"output": params["embedding"].clone()},
        ftrain.llama.Config(**vars(cfg) | {"tie_embeddings": False}),
    )
    (tmp_path / "untied.toml").write_text(RECIPE.format(hf=untied))
    (one, values), _ = ranks(2, tied_gradients, 2, tied)
    (two, _), _ = ranks(2, tied_gradients, 2, str(tmp_path / "untied.toml"))
    assert sum(value.size for value in values.values()) == 7248
    np.testing.assert_allclose(one["embedding"], two["embedding"] + two["output"], rtol=1e-5, atol=1e-7)
    assert np.abs(two["output"]).max() > 0 and np.abs(two["embedding"]).max() > 0

    out = tmp_path / "out"
    path = tmp_path / "hf.toml"
    path.write_text(path.read_text().replace("every = 2", "every = 2\nexport_hf = true"))
    assert ranks(2, train_on, 2, tied, out) == [3, 3]
    names = [name for name in checkpoint.schema(out / "checkpoints" / "step-00000003") if name.startswith("params")]
    assert "params.embedding" in names and "params.output" not in names
    config = json.loads((out / "hf" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    run = Run(load_recipe(tied))
    state, _ = resume.state_to_read(run, out)
    assert torch.equal(full(state.params)["embedding"], hf.load(out / "hf").params["embedding"])
    torch.testing.assert_close(run_said(run, state), logits_of(reopened(out / "hf"), TOKENS), atol=1e-4, rtol=0)
    # It goes on from its own state, one leaf for both uses.
    shutil.rmtree(out / "checkpoints" / "step-00000003")
    before = (out / "hf" / "model.safetensors").read_bytes()
    assert ranks(2, train_on, 2, tied, out) == [3, 3]
    assert (out / "hf" / "model.safetensors").read_bytes() == before


# --- export ----------------------------------------------------------------------------------------------------------


def corpus(tmp_path):
    (tmp_path / "text.txt").write_text("the cat and the hat sat on the mat. " * 200)
    return f"data.source={tmp_path / 'text.txt'}"


def test_an_export_has_the_tokenizer_that_the_text_went_through(tiny, tmp_path):
    tokenizer = byte_level(tmp_path / "mine.json", ["<s>", "</s>"])
    recipe = tiny(
        corpus(tmp_path), f"data.tokenizer={tokenizer}", "data.bos=<s>", "model.vocab_size=400", "data.cache=off"
    )
    out = tmp_path / "out"
    train(recipe, out=out, quiet=True)
    arguments = ["export-hf", str(out / "recipe.toml"), "--checkpoint", str(out), "--out", str(tmp_path / "hf")]
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 0, ran.output
    assert ran.output == f"{out}/checkpoints/step-00000006, after 6 steps, is in {tmp_path / 'hf'} in float32\n"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = Run(recipe).tokenizer
    assert theirs("the cat", add_special_tokens=False)["input_ids"] == ours.encode("the cat")
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos, ours.eos)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    for said in (config, generation):
        assert (said["bos_token_id"], said["eos_token_id"]) == (ours.bos, ours.eos)
    # The sample that the run prints is what transformers writes.
    run = Run(recipe)
    state, _ = resume.state_to_read(run, out)
    prompt = [ours.bos, *ours.encode("the")]
    found = reopened(tmp_path / "hf").generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert run.generate(state, prompt, 12) == found[0, len(prompt) :].tolist()

    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 2 and f"{tmp_path / 'hf'} is there already: give the name of a new folder" in ran.output
    ran = CliRunner().invoke(main, [*arguments[:-1], str(tmp_path / "half"), "--dtype", "bfloat16", "--json"])
    assert json.loads(ran.output) == {
        "checkpoint": f"{out}/checkpoints/step-00000006",
        "step": 6,
        "out": str(tmp_path / "half"),
        "dtype": "bfloat16",
    }
    assert {leaf.dtype for leaf in tree.leaves(hf.load(tmp_path / "half").params)} == {torch.bfloat16}


def test_an_export_of_a_trained_tokenizer_and_of_bytes(tiny, tmp_path):
    trained = tiny(
        corpus(tmp_path), "data.tokenizer=bpe:260", "checkpoint.export_hf=true", f"data.cache={tmp_path}/cache"
    )
    train(trained, out=tmp_path / "a", quiet=True)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "a" / "hf")
    ours = Run(trained).tokenizer
    ids = ours.encode("the cat sat")
    assert theirs("the cat sat", add_special_tokens=False)["input_ids"] == ids and theirs.decode(ids) == "the cat sat"
    assert theirs.eos_token_id == ours.eos
    train(tiny(corpus(tmp_path), "checkpoint.export_hf=true"), out=tmp_path / "b", quiet=True)
    names = sorted(path.name for path in (tmp_path / "b" / "hf").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    config = json.loads((tmp_path / "b" / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == 256 and config["max_position_embeddings"] == 16


def test_what_lay_beside_the_weights_is_carried_through_a_run(model, tmp_path):
    path = model()
    (tmp_path / "hf" / "generation_config.json").write_text('{"top_p": 0.5}')
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    edit(tmp_path / "hf", eos_token_id=[3, 4], max_position_embeddings=77)
    train(load_recipe(path, ["checkpoint.export_hf=true"]), out=tmp_path / "out", quiet=True)
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / "hf" / name).read_text() == (tmp_path / "hf" / name).read_text()
    config = json.loads((tmp_path / "out" / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == [3, 4] and config["max_position_embeddings"] == 77


def test_another_tokenizer_leaves_the_first_ones_files_behind(model, tmp_path):
    path = model(vocab_size=400)
    byte_level(tmp_path / "hf" / "tokenizer.json", ["</s>"])
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "hf" / "special_tokens_map.json").write_text("{}")
    (tmp_path / "mine").mkdir()
    mine = byte_level(tmp_path / "mine" / "tokenizer.json", ["<end>"])
    overrides = [corpus(tmp_path), "data.cache=off", "train.steps=1", "checkpoint.export_hf=true"]
    train(load_recipe(path, [*overrides, f"data.tokenizer={mine}", "data.eos=<end>"]), out=tmp_path / "a", quiet=True)
    assert (tmp_path / "a" / "hf" / "tokenizer.json").read_text() == (tmp_path / "mine" / "tokenizer.json").read_text()
    assert not (tmp_path / "a" / "hf" / "special_tokens_map.json").exists()
    train(load_recipe(path, overrides), out=tmp_path / "b", quiet=True)
    assert (tmp_path / "b" / "hf" / "tokenizer.json").read_text() == (tmp_path / "hf" / "tokenizer.json").read_text()
    assert (tmp_path / "b" / "hf" / "special_tokens_map.json").exists()


def test_a_tokenizer_that_ends_documents_otherwise_than_the_model_is_told_of(model, tmp_path, capsys):
    path = model(vocab_size=400)
    byte_level(tmp_path / "hf" / "tokenizer.json", ["<s>", "</s>", "<end>"])
    edit(tmp_path / "hf", bos_token_id=0, eos_token_id=[7, 1])
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    overrides = [corpus(tmp_path), "data.cache=off", "train.steps=1"]
    train(load_recipe(path, overrides))
    assert "token_id" not in capsys.readouterr().out
    train(load_recipe(path, [*overrides, "data.eos=<end>"]))
    said = f"eos_token_id is 2 in data.tokenizer and [7, 1] in the config.json of model.hf='{tmp_path / 'hf'}'\n"
    assert said in capsys.readouterr().out


def test_an_export_needs_a_folder(tiny):
    with pytest.raises(RecipeError, match="checkpoint.export_hf=true needs a folder to write to: give --out."):
        train(tiny("checkpoint.export_hf=true"))


def test_the_command_says_what_is_missing(tiny, tmp_path):
    tiny()
    arguments = ["export-hf", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "hf")]
    assert CliRunner().invoke(main, arguments).exit_code == 2
    ran = CliRunner().invoke(main, [*arguments, "--checkpoint", str(tmp_path / "nowhere")])
    assert ran.exit_code == 2 and "no complete checkpoint there" in ran.output and not (tmp_path / "hf").exists()
