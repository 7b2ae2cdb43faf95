"""Recipes are strict: what is wrong is said, all of it, with the key, the value and what would work."""

import dataclasses
import pickle
import tomllib

import pytest

import ftrain.recipe as recipes
from ftrain.recipe import (
    RecipeError,
    accumulation,
    dump,
    load_recipe,
    model_config,
    resolve_parallel,
    shipped,
)
from ftrain.recipe.strict import expected, keys

MODEL = """
[model]
vocab_size = 64
dim = 16
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 48
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, model: str = MODEL) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text + model)
        return str(path)

    return write


def problems(path, overrides=(), **kwargs) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides, **kwargs)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data]\nseqlen = 16", ["data.seqlen = 16", "data.seq_len?"]),
        ("[optimiser]\nlr = 1.0", ["[optimiser]", "[optimizer]?"]),
        ('[train]\nsteps = "10"', ['train.steps = "10"', "an integer", "a string"]),
        ('[optimizer]\nlr = "3e-4"', ['optimizer.lr = "3e-4"', "a number", "a string"]),
        ("[train]\nsteps = 10.5", ["train.steps = 10.5", "an integer"]),
        ("[train]\nsteps = true", ["train.steps = true", "an integer"]),
        ("[train]\ncompile = 1", ["train.compile = 1", "true or false"]),
        ("[optimizer]\nlr = nan", ["optimizer.lr = nan", "a number", "finite"]),
        ("[optimizer]\neps = inf", ["optimizer.eps = inf", "a number", "finite"]),
        ("[optimizer]\nlr = true", ["optimizer.lr = true", "a number"]),
        ("[optimizer]\nlr = -1", ["optimizer.lr = -1", "above 0"]),
        ("[optimizer]\nbetas = [0.9]", ["optimizer.betas = [0.9]", "2 numbers"]),
        ("[optimizer]\nbetas = [0.9, 1.0]", ["optimizer.betas = [0.9, 1.0]", "below 1"]),
        ("[train]\nsteps = 0", ["train.steps = 0", "at least 1"]),
        ("[train]\nremat = 1.5", ["train.remat = 1.5", '"full"', "at most 1"]),
        ('[train]\nremat = "ful"', ['train.remat = "ful"', 'did you mean "full"?']),
        ('[schedule]\ndecay = "cosin"', ["schedule.decay", 'did you mean "cosine"?']),
        ('[fp8]\nrecipe = "rowise"', ["fp8.recipe", 'did you mean "rowwise"?']),
        ("[data]\nlr = 1.0", ["data.lr = 1.0", "belongs in [optimizer]"]),
        ("[train]\nevery = 1", ["train.every = 1", "[checkpoint] or [validation]"]),
        ("[train]\nwarmup = 1", ["train.warmup = 1", "schedule.warmup_steps?"]),
        (
            '[precision]\nmoments = "bfloat16"\n[optimizer]\nbetas = [0.9, 0.999]',
            ["optimizer.betas = [0.9, 0.999]", 'precision.moments = "bfloat16"', "0.001 a step", "0.99609"],
        ),
        ("steps = 3", ["steps = 3", "outside any table", "[train]"]),
        ("train = 3", ["train = 3", "expected a table"]),
        ('[fp8]\nrecipe = "tensorwise"\nskip = "output"', ["fp8.skip", "a list of strings", "a string"]),
        (
            "[metrics]\nprofile_steps = [3, 0]",
            ["metrics.profile_steps = [3, 0]", "a list of integers", "at least 1"],
        ),
        ("[train]\nseed = 9223372036854775808", ["train.seed"]),
    ],
)
def test_a_mistake_is_named_with_its_key_its_value_and_what_would_work(write, text, words):
    found = problems(write(text))
    assert len(found) == 1
    for word in words:
        assert word in found[0], found[0]


def test_an_integer_is_a_number(write):
    lr = load_recipe(write("[optimizer]\nlr = 1")).optimizer.lr
    assert lr == 1.0 and isinstance(lr, float)


def test_all_mistakes_come_together_one_on_a_line(write):
    path = write('[train]\nsteps = 0\n[data]\nseqlen = 1\n[optimizer]\nlr = "x"\n[parallel]\nshard = 0')
    found = problems(path, ["schedule.decay=cosin", "nonsense"])
    assert len(found) == 6
    error = RecipeError(found)
    assert str(error).split("\n") == found
    assert pickle.loads(pickle.dumps(error)).problems == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nsteps = 1\nsteps = 2", ["given twice", "line 3", "steps = 2"]),
        ("[train]\nsteps = 1\n[train]\nseed = 2", ["given twice", "line 3", "[train]"]),
        ("[train]\nsteps = = 1", ["not valid TOML", "line 2", "steps = = 1"]),
        ("[train]\nsteps = ", ["not valid TOML", "line 2"]),
    ],
)
def test_text_that_is_no_toml_is_shown_with_its_line(write, text, words):
    (found,) = problems(write(text))
    assert "run.toml" in found
    for word in words:
        assert word in found, found


def test_a_file_that_is_not_text_or_not_there(tmp_path):
    (tmp_path / "bytes.toml").write_bytes(b"[train]\nx = '\xff'")
    assert "UTF-8" in problems(tmp_path / "bytes.toml")[0]
    assert "folder" in problems(tmp_path)[0]
    (found,) = problems("debgu")
    assert "did you mean debug?" in found and "llama3-8b" in found
    assert "no such file" in problems(str(tmp_path / "absent.toml"))[0]


def test_a_shipped_name_wins_over_a_file_of_that_name_only_without_a_suffix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "debug").write_text("[train]\nsteps = 0")
    (tmp_path / "debug.toml").write_text("[train]\nsteps = 0")
    assert load_recipe("debug").train.steps > 0
    assert "train.steps = 0" in problems("debug.toml")[0]
    assert "train.steps = 0" in problems(tmp_path / "debug")[0]


# --- overrides --------------------


def test_overrides_are_toml_values_or_bare_strings(write):
    recipe = load_recipe(
        write("[train]\nsteps = 3"),
        [
            "train.steps=5",
            "train.steps = 7",
            "checkpoint.resume=runs/2024-01-01/a=b",
            "data.source='stdlib'",
            "optimizer.betas=[0.8, 0.9]",
            "fp8.recipe=tensorwise",
            'fp8.skip=["output", "layers.0.*"]',
            "train.compile=false",
            "data.cache=2024-01-01",
            "train.remat=0.5",
        ],
    )
    assert recipe.train == dataclasses.replace(recipe.train, steps=7, compile=False, remat=0.5)
    assert recipe.checkpoint.resume == "runs/2024-01-01/a=b"
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.fp8.skip == ("output", "layers.0.*")
    assert recipe.data.cache == "2024-01-01"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=ten", 'train.steps = "ten"'),
        ("train.steps=5.0", "train.steps = 5.0"),
        ("train.stps=5", "train.steps?"),
        ("trian.steps=5", "[train]?"),
        ("train.steps", "table.key=value"),
        ("steps=5", "table.key=value"),
        ("train.=5", "table.key=value"),
        ("optimizer.lr=nan", "optimizer.lr = nan"),
        ("optimizer.lr=1\nseed = 3", "optimizer.lr"),
        ("fp8.recipe.x=3", "not a table"),
    ],
)
def test_overrides_go_through_the_same_checks(write, override, words):
    (found,) = problems(write('[fp8]\nrecipe = "none"'), [override])
    assert words in found


# --- between keys --------------------


def test_a_warm_up_longer_than_the_run_is_refused_and_a_default_one_shrinks(write):
    (found,) = problems(write("[train]\nsteps = 10\n[schedule]\nwarmup_steps = 11"))
    assert "schedule.warmup_steps=11" in found and "train.steps=10" in found
    assert load_recipe(write("[train]\nsteps = 10\n[schedule]\nwarmup_steps = 10")).schedule.warmup_steps == 10
    assert load_recipe(write("[train]\nsteps = 5")).schedule.warmup_steps <= 5
    assert load_recipe(write("[train]\nsteps = 1000")).schedule.warmup_steps == 20


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.n_kv_heads=2", "model.n_kv_heads=2 does not divide by parallel.tensor=4"),
        ("model.ffn_dim=50", "model.ffn_dim=50 does not divide by parallel.tensor=4"),
        ("data.seq_len=30", "data.seq_len=30 does not divide by parallel.tensor=4"),
        ("model.vocab_size=66", "model.vocab_size=66 does not divide by parallel.tensor=4"),
    ],
)
@pytest.mark.parametrize("tensor", ["4", "-1"])
def test_what_tensor_parallelism_splits_must_divide(write, key, words, tensor):
    layout = [f"parallel.tensor={tensor}", "parallel.shard=1", "model.n_kv_heads=4"]
    found = problems(write(""), [*layout, key], world_size=4)
    assert len(found) == 1 and words in found[0]


def test_heads_must_divide_too(write):
    overrides = ["parallel.tensor=4", "model.n_heads=6", "model.n_kv_heads=3", "model.head_dim=4"]
    found = problems(write(""), overrides)
    assert "model.n_heads=6 does not divide by parallel.tensor=4; 1, 2, 3 would." in found
    assert "model.n_kv_heads=3 does not divide by parallel.tensor=4; 1, 3 would." in found
    assert "model.dim=16 does not divide by model.n_heads=5" in problems(write(""), ["model.n_heads=5"])[0]
    assert "model.n_heads=4 does not divide by model.n_kv_heads=3" in problems(write(""), ["model.n_kv_heads=3"])[0]
    assert "model.head_dim=5 is odd" in problems(write(""), ["model.head_dim=5"])[0]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"shard": 3}, "replicate 1 x shard 3 x tensor 1"),
        ({"shard": -1, "tensor": 3}, "4/3"),
        ({"shard": -1, "replicate": -1}, "both -1"),
        ({"shard": 0}, "shard=0"),
        ({"shard": -2}, "shard=-2"),
        ({"shard": 8}, "is 8, not 4"),
        ({"shard": 2, "tensor": 1}, "is 2, not 4"),
    ],
)
def test_degrees_must_multiply_to_the_world_size(write, layout, words):
    overrides = [f"parallel.{axis}={degree}" for axis, degree in layout.items()]
    found = problems(write("", MODEL.replace("n_kv_heads = 2", "n_kv_heads = 4")), overrides, world_size=4)
    assert len(found) == 1 and "\n" not in found[0]
    for word in (words, "world size of 4", " x shard ", " x tensor "):
        assert word in found[0]
    with pytest.raises(RecipeError) as caught:
        resolve_parallel(recipes.Parallel(**layout), 4)
    assert caught.value.problems == found


@pytest.mark.parametrize("layout", [{"shard": 2, "tensor": 2}, {"tensor": 2}, {"replicate": -1, "shard": 2}])
def test_degrees_that_do_are_resolved(layout):
    parallel = resolve_parallel(recipes.Parallel(**layout), 4)
    assert parallel.replicate * parallel.shard * parallel.tensor == 4
    assert resolve_parallel(parallel, 4) == parallel


def test_accumulation_follows_from_batch_and_ranks(write):
    recipe = load_recipe(write("[data]\nglobal_batch_size = 24\n[train]\nmicro_batch_size = 4"))
    assert [accumulation(recipe, dp) for dp in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(RecipeError, match="=24 does not divide by train.micro_batch_size=4 x 4 .* = 16; .*=3 would"):
        accumulation(recipe, 4)
    (found,) = problems(write("[train]\nmicro_batch_size = 3"))
    assert "data.global_batch_size=8" in found and "train.micro_batch_size=3" in found
    (found,) = problems(write(""), ["train.micro_batch_size=8"], world_size=2)
    assert "8 x 2 data-parallel ranks = 16; train.micro_batch_size=4 would" in found


def test_fp8_keys_need_a_recipe_and_one_scale_a_weight_to_travel(write):
    assert "fp8.recipe is not" in problems(write("[fp8]\nall_gather = true"))[0]
    found = problems(write('[fp8]\nrecipe = "rowwise"\nall_gather = true'))
    assert "fp8.recipe = 'rowwise'" in found[0] and "fp8.all_gather = true" in found[0]
    fp8 = load_recipe(write('[fp8]\nrecipe = "rowwise"')).fp8
    assert not fp8.all_gather and not fp8.precompute_scales
    fp8 = load_recipe(write('[fp8]\nrecipe = "tensorwise"')).fp8
    assert fp8.all_gather and fp8.precompute_scales and fp8.skip == ("output",)
    assert load_recipe(write('[fp8]\nrecipe = "none"\nall_gather = true\nskip = []')).fp8.recipe == "none"
    found = problems(write('[fp8]\nrecipe = "tensorwise"\nprecompute_scales = false\ncache_shards = true'))
    assert "fp8.cache_shards" in found[0]


def test_the_default_skip_of_a_tied_model_is_its_embedding(write):
    tied = MODEL + "tie_embeddings = true"
    assert load_recipe(write('[fp8]\nrecipe = "tensorwise"', tied)).fp8.skip == ("embedding",)


# --- the model --------------------


def test_presets_dimensions_and_both(write):
    config = model_config(load_recipe(write("")).model)
    assert (config.dim, config.head_dim, config.n_kv_heads) == (16, 4, 2)
    config = model_config(load_recipe(write("", '[model]\npreset = "llama3-8b"\nn_layers = 2')).model)
    assert (config.dim, config.n_layers) == (4096, 2)
    assert model_config(recipes.Model(preset="llama3-8b", rope_theta=1e4)).rope_theta == 1e4


def test_a_model_that_is_not_whole_or_not_there(write):
    assert "lacks model.vocab_size and" in problems(write("", ""))[0]
    (found,) = problems(write("", "[model]\ndim = 16"))
    assert "model.n_heads" in found and "llama3-8b" in found and "model.dim" not in found
    assert 'did you mean "llama3-8b"?' in problems(write("", '[model]\npreset = "llama3-8"'))[0]
    assert 'expected one of "llama"' in problems(write("", '[model]\nfamily = "mamba"'))[0]


def test_rope_scaling_is_checked_to_the_last_key(write):
    scaling = {
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 64,
    }
    overrides = [f"model.rope_scaling.{name}={value}" for name, value in {"type": "llama3", **scaling}.items()]
    assert model_config(load_recipe(write(""), overrides).model).rope_scaling == {"type": "llama3", **scaling}
    assert "lacks type" in problems(write(""), overrides[1:])[0]
    assert "rope_scaling.factor?" not in problems(write(""), [*overrides, "model.rope_scaling.facto=1"])[0]
    assert "did you mean" in problems(write(""), [*overrides, "model.rope_scaling.facto=1"])[0]
    assert 'expected "llama3"' in problems(write(""), [*overrides, "model.rope_scaling.type=yarn"])[0]
    assert "above 0" in problems(write(""), [*overrides, "model.rope_scaling.factor=0"])[0]


# --- shipped recipes, and back to text --------------------


RANKS = {"debug": 4, "qwen3-debug": 4, "llama3-70b": 128, "llama3-405b": 512}


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_fit_their_machines_and_survive_a_round_trip(name, tmp_path):
    recipe = load_recipe(name, world_size=RANKS.get(name, 8))
    path = tmp_path / "recipe.toml"
    path.write_text(dump(recipe))
    assert load_recipe(path) == recipe
    assert load_recipe(name, ["fp8.recipe=none"]).fp8.recipe == "none"


def test_every_value_survives_a_round_trip(write, tmp_path):
    table = 'recipe = {base = "tensorwise", output = {x = "e4m3", w = "e4m3"}}'
    path = write(
        f"[fp8]\n{table}\nskip = []\n[optimizer]\nlr = 1e-7\n[train]\nremat = 0.25\n"
        '[data]\ncache = "a\\"b\\\\c é"\n'
        "[metrics]\nprofile_steps = [3, 4]\n"
    )
    recipe = load_recipe(path)
    (tmp_path / "again.toml").write_text(dump(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe
    assert tomllib.loads(dump(recipe))["fp8"]["recipe"]["output"] == {"x": "e4m3", "w": "e4m3"}


def test_the_shipped_recipes():
    assert {"debug", "llama3-8b", "llama3-70b", "llama3-405b", "llama3.2-1b", "llama3.2-3b"} <= set(shipped())
    assert {"qwen3-debug", "qwen3-0.6b", "qwen3-8b"} <= set(shipped())


def test_every_key_is_documented_and_its_default_passes_its_own_check():
    for table, cls in recipes.TABLES.items():
        for field in keys(cls).values():
            assert field.metadata["doc"], f"{table}.{field.name}"
            assert expected(field.type, field.metadata)
    assert recipes.check(dataclasses.replace(recipes.Recipe(), model=recipes.Model(preset="debug"))) == []


def test_a_recipe_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipes.Recipe().train.steps = 3
    assert load_recipe("debug") == load_recipe("debug")
