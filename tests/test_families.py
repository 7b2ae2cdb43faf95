"""A model family is one file: recipes, runs and reports know it by what that file says."""

import dataclasses
import sys
import textwrap

import pytest

from ftrain import Run, models, tree
from ftrain.models import llama
from ftrain.recipe import Model, RecipeError, dump, load_recipe, model_config
from ftrain.report import as_json, inspect, render
from ftrain.throughput import Clock

# A Llama whose residual stream is scaled by a number of its own: another Config, preset, block and cost.
FAMILY = """
    from dataclasses import dataclass, replace
    from ftrain.execution import Execution
    from ftrain.models import llama
    from ftrain.models.llama import abstract, decoder, init, product_weights
    from ftrain.recipe.strict import key

    @dataclass(frozen=True)
    class Config(llama.Config):
        gain: float = key(1.0, "what each layer's output is multiplied by", above=0)
        quiet: bool = False

    PRESETS = {"scaled-tiny": Config(272, 16, 2, 4, 2, 4, 48, gain=0.5)}

    def flops_per_token(cfg, seq_len):
        return 1000.0 * seq_len

    def block(weights, x, *args, cfg, linear):
        return cfg.gain * llama.block(weights, x, *args, cfg=cfg, linear=linear)

    def make_model(cfg, execution=None):
        return decoder(cfg, execution or Execution(), abstract(cfg), block)
"""


@pytest.fixture
def family(tmp_path, monkeypatch):
    """A family "scaled" beside the shipped ones, and the path of a recipe of it."""
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "scaled.py").write_text(textwrap.dedent(FAMILY))
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(folder)])
    recipe = tmp_path / "scaled.toml"
    recipe.write_text(
        '[model]\npreset = "scaled-tiny"\n[data]\nsource = "synthetic"\nseq_len = 16\n'
        '[precision]\ncompute = "float32"\n[train]\nmicro_batch_size = 2\n'
        "compile = false\nsteps = 2\n"
    )
    yield str(recipe)
    sys.modules.pop("ftrain.models.scaled", None)
    vars(models).pop("scaled", None)


def test_every_family_keeps_the_contract():
    names = [set(models.family(name).PRESETS) for name in models.families()]
    assert sum(map(len, names)) == len(set().union(*names)), "two families have a preset of one name"
    common = {"vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "tie_embeddings"}
    for name in models.families():
        module = models.family(name)
        assert common <= {field.name for field in dataclasses.fields(module.Config)}
        for preset, cfg in module.PRESETS.items():
            assert model_config(Model(preset=preset)) == cfg
            declared = module.abstract(dataclasses.replace(cfg, n_layers=1))
            assert isinstance(declared["layers"], list)
            assert module.flops_per_token(cfg, 8) > 6 * cfg.n_layers * cfg.dim * cfg.ffn_dim
            assert all(any(c in path for path in tree.names(declared)) for c in ("embedding", "layers.0."))


def test_a_preset_names_its_family(family):
    recipe = load_recipe(family)
    assert recipe.model.family == "scaled"
    assert load_recipe("debug").model.family == "llama"
    assert model_config(recipe.model).gain == 0.5


def test_a_family_has_keys_of_its_own_and_they_are_strict(family, tmp_path):
    recipe = load_recipe(family, ["model.gain=2", "model.n_layers=1"])
    cfg = model_config(recipe.model)
    assert (cfg.gain, cfg.quiet, cfg.n_layers) == (2.0, False, 1) and isinstance(cfg.gain, float)
    (tmp_path / "again.toml").write_text(dump(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe and "gain = 2.0" in dump(recipe)
    for override, words in [
        ("model.gain=0", "model.gain = 0: expected a number, above 0"),
        ("model.quiet=1", "model.quiet = 1: expected true or false"),
        ("model.gian=2", "(did you mean model.gain?)"),
        ("model.own={gain=2}", "there is no key own"),
    ]:
        with pytest.raises(RecipeError) as caught:
            load_recipe(family, [override])
        assert words in str(caught.value)


def test_keys_of_another_family_are_refused(family):
    with pytest.raises(RecipeError, match="there is no key gain in \\[model\\]"):
        load_recipe("debug", ["model.gain=2"])
    with pytest.raises(RecipeError, match='model.preset = "scaled-tiny": expected one of "debug"'):
        load_recipe(family, ["model.family=llama"])
    with pytest.raises(RecipeError, match='expected one of .*"scaled-tiny"'):
        load_recipe(family, ["model.preset=scaled-tny"])


def test_a_run_and_its_report_are_the_familys(family):
    run = Run(load_recipe(family))
    plain = llama.make_model(run.cfg)
    state = run.init()
    batch = run.batch(0)
    assert run.model.loss(state.params, batch)[0] != plain.loss(state.params, batch)[0]
    same = Run(load_recipe(family, ["model.gain=1.0"])).model.loss(state.params, batch)[0]
    assert same == plain.loss(state.params, batch)[0]
    assert Clock(run).flops_per_token == 16000.0
    found = inspect(family, world_size=4)
    assert as_json(found)["model"]["family"] == "scaled" and as_json(found)["model"]["gain"] == 0.5
    assert {line["phase"] for line in as_json(found)["collectives"]} >= {"forward", "backward"}
    assert "dim 16" in render(found)
