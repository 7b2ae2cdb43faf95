"""The recipe algebra, a user's own table, and what cannot be combined."""

import tomllib

import pytest

from ftrain.fp8 import RECIPES, Operand, Product, Recipe, check, describe, parse, uses_history, wire_operand
from ftrain.fp8.recipes import operands
from ftrain.recipe.tables import FP8_RECIPES


def test_named_recipes_say_what_each_product_does():
    assert describe(RECIPES["tensorwise"]) == [
        "output = x . w: x e4m3 tensor, w e4m3 tensor, fast accumulation",
        "grad_input = g . w: g e5m2 tensor, w e4m3 tensor",
        "grad_weight = g . x: g e5m2 tensor, x e4m3 tensor",
    ]
    assert describe(RECIPES["rowwise_with_gw_hp"]) == [
        "output = x . w: x e4m3 row power_of_two, w e4m3 row power_of_two, fast accumulation",
        "grad_input = g . w: g e4m3 row power_of_two, w e4m3 tensor power_of_two",
        "grad_weight = g . x: high precision",
    ]
    assert describe(RECIPES["none"])[0] == "output = x . w: high precision"
    assert [uses_history(r) for r in RECIPES.values()] == [r.name == "delayed" for r in RECIPES.values()]


def test_every_named_recipe_can_be_written_as_a_table():
    for recipe in RECIPES.values():
        table = {"name": recipe.name}
        for name in ("output", "grad_input", "grad_weight"):
            product = getattr(recipe, name)
            if product is None:
                table[name] = "high"
                continue
            pair = {tensor: str(o) for which, tensor, o in operands(recipe) if which == name}
            table[name] = {**pair, "fast_accumulation": product.fast_accumulation}
        assert parse(table) == recipe
        assert parse(recipe.name) is recipe


def test_the_names_that_a_recipe_file_may_use_are_those_that_there_are():
    assert FP8_RECIPES == tuple(RECIPES)


def test_a_users_own_table():
    text = """
    [fp8.recipe]
    name = "mine"
    base = "tensorwise"
    output = { x = "e4m3 row power_of_two", w = "e4m3" }
    grad_weight = "high"
    """
    recipe = parse(tomllib.loads(text)["fp8"]["recipe"])
    assert recipe == Recipe(
        "mine",
        output=Product(Operand("e4m3", "row", power_of_two=True), Operand("e4m3")),
        grad_input=RECIPES["tensorwise"].grad_input,
        grad_weight=None,
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("tensorwis", ["fp8.recipe: 'tensorwis'", "did you mean 'tensorwise'"]),
        (3, ["fp8.recipe: 3 is of type int"]),
        ({"base": "rowise"}, ["fp8.recipe.base: 'rowise'", "'rowwise'"]),
        ({"output": "high"}, ["fp8.recipe.grad_input: missing", "fp8.recipe.grad_weight: missing"]),
        ({"base": "none", "outptu": "high"}, ["fp8.recipe.outptu: unknown key", "'output'"]),
        ({"base": "none", "name": 3}, ["fp8.recipe.name: 3"]),
        ({"base": "none", "output": True}, ["fp8.recipe.output: True"]),
        ({"base": "none", "output": {"x": "e4m3"}}, ["fp8.recipe.output.w: missing", "fp8, or neither"]),
        (
            {"base": "none", "output": {"x": "e4m3", "g": "e4m3", "w": "e4m3"}},
            ["fp8.recipe.output.g: unknown"],
        ),
        (
            {"base": "none", "output": {"x": "e4m3", "w": "bf16"}},
            ["fp8.recipe.output.w: 'bf16'", "e4m3, e5m2"],
        ),
        ({"base": "none", "output": {"x": "e4m3 rows", "w": "e4m3"}}, ["unknown word 'rows'", "'row'"]),
        ({"base": "none", "output": {"x": "e4m3 row tensor", "w": "e4m3"}}, ["output.x", "one thing twice"]),
        ({"base": "none", "output": {"x": 4, "w": "e4m3"}}, ["fp8.recipe.output.x: 4"]),
        (
            {"base": "none", "output": {"x": "e4m3", "w": "e4m3", "fast_accumulation": 1}},
            ["fp8.recipe.output.fast_accumulation: 1"],
        ),
        (
            {"base": "none", "output": {"x": "e5m2", "w": "e5m2"}},
            ["fp8.recipe.output: both operands are e5m2"],
        ),
        ({"base": "none", "output": {"x": "e4m3 block", "w": "e4m3 row"}}, ["block and row scales"]),
        ({"base": "none", "grad_weight": {"g": "e5m2 block", "x": "e4m3 block"}}, ["block scales need e4m3"]),
        (
            {"base": "none", "output": {"x": "e4m3 row history", "w": "e4m3"}},
            ["output.x", "one scale a tensor"],
        ),
        ({"base": "delayed", "grad_weight": {"g": "e5m2", "x": "e4m3"}}, ["has a history", "grad_weight"]),
        ({"base": "delayed", "grad_input": "high"}, ["w has a history", "both output and grad_input"]),
    ],
)
def test_mistakes_are_sentences_that_name_their_path(value, said):
    with pytest.raises(ValueError) as error:
        parse(value)
    for words in said:
        assert words in str(error.value)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ValueError) as error:
        parse({"output": {"x": "e4m4", "w": "e4m3 rowe"}, "grad_input": 1, "gradweight": "high"})
    assert len(str(error.value).splitlines()) == 5


def test_the_wire_form_of_a_weight():
    assert wire_operand(RECIPES["tensorwise"]) == Operand("e4m3")
    assert wire_operand(RECIPES["delayed"]) == Operand("e4m3", scale="history")
    for name in ("none", "rowwise", "rowwise_with_gw_hp", "blockwise"):
        assert wire_operand(RECIPES[name]) is None


def test_combinations_that_work_have_no_problems():
    for name in ("none", "tensorwise"):
        assert check(RECIPES[name], True, True, "cpu") == []
        assert check(RECIPES[name], True, True, "cuda", (9, 0), tensor=8) == []
    assert check(RECIPES["tensorwise"], True, True, "cuda") == []
    assert check(RECIPES["rowwise"], False, False, "cuda", (8, 9)) == []
    assert check(RECIPES["delayed"], True, False, "cpu") == []
    assert check(RECIPES["blockwise"], False, False, "cuda", (9, 0)) == []
    assert check(RECIPES["none"], True, True, "cuda", (7, 0)) == []


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        (
            "rowwise",
            (True, False, "cpu"),
            ["fp8.all_gather = true", "'rowwise'", "e4m3 row power_of_two in output"],
        ),
        ("rowwise_with_gw_hp", (True, False, "cpu"), ["fp8.all_gather = true"]),
        ("rowwise", (False, True, "cpu"), ["fp8.precompute_scales = true", "nothing to precompute"]),
        ("delayed", (True, True, "cpu"), ["fp8.precompute_scales = true", "history"]),
        ("tensorwise", (True, True, "cuda", (8, 0)), ["capability 8.0", "8.9"]),
        ("tensorwise", (True, True, "mps"), ["'mps'"]),
        ("blockwise", (False, False, "cpu"), ["'blockwise' on 'cpu'", "CUDA only"]),
        ("blockwise", (False, False, "cuda", (10, 0)), ["capability 10.0", "Hopper"]),
        ("blockwise", (False, False, "cuda", (9, 0), 2), ["parallel.tensor = 2"]),
    ],
)
def test_combinations_that_cannot_work_are_named(name, settings, said):
    problems = check(RECIPES[name], *settings)
    assert len(problems) == 1
    for words in said:
        assert words in problems[0]
