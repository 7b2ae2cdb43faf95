"""Parameter trees: leaves pair by name, and what cannot pair says which path is wrong."""

from typing import NamedTuple

import pytest

from ftrain import tree


class Pair(NamedTuple):
    first: object
    second: object


NESTED = {"layers": [{"wv": 1, "wk": 2}, {"wk": 3, "wv": 4}], "embedding": 0, "state": Pair((5, 6), {"x": 7})}


def test_names_are_dotted_and_in_the_order_of_the_leaves():
    assert tree.named_leaves(NESTED) == [
        ("embedding", 0),
        ("layers.0.wk", 2),
        ("layers.0.wv", 1),
        ("layers.1.wk", 3),
        ("layers.1.wv", 4),
        ("state.first.0", 5),
        ("state.first.1", 6),
        ("state.second.x", 7),
    ]


def test_layers_are_in_the_order_of_their_numbers_not_of_their_names():
    assert tree.names({"layers": list(range(12))})[9:] == ["layers.9", "layers.10", "layers.11"]


def test_unflatten_is_the_inverse_of_flatten():
    leaves, treedef = tree.flatten(NESTED)
    assert tree.unflatten(treedef, leaves) == NESTED
    assert leaves == tree.leaves(NESTED)


def test_trees_pair_by_name_whatever_the_order_their_keys_came_in():
    params, grads = {"wk": 0, "wv": 0}, {"wv": 1, "wk": -1}
    assert tree.map(lambda p, g: p - g, params, grads) == {"wk": 1, "wv": -1}
    assert tree.map_named(lambda path, p, g: (path, p - g), params, grads) == {
        "wk": ("wk", 1),
        "wv": ("wv", -1),
    }


@pytest.mark.parametrize("over", [tree.map, lambda fn, *trees: tree.map_named(lambda _, *x: fn(*x), *trees)])
@pytest.mark.parametrize(
    "other,words",
    [
        ({"a": 1, "b": [1]}, ["lacks b.1"]),
        ({"a": 1, "b": [1, 2, 3]}, ["has b.2 besides"]),
        ({"A": 1, "b": [1, 2]}, ["lacks a", "has A besides"]),
        ({"a": None, "b": [1, 2]}, ["lacks a"]),
        ({"a": 1, "b": (1, 2)}, ["list", "tuple"]),
    ],
)
def test_trees_that_differ_are_refused_by_path(over, other, words):
    with pytest.raises(ValueError) as error:
        over(lambda x, y: x, {"a": 1, "b": [1, 2]}, other)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("key", [3, "a.b", None, ("x",)])
def test_a_key_that_makes_no_path_is_refused_with_its_place(key):
    with pytest.raises(ValueError) as error:
        tree.named_leaves({"layers": [{"wq": {key: 1}}]})
    assert repr(key) in str(error.value) and "layers.0.wq" in str(error.value)


def test_none_is_an_absent_subtree():
    assert tree.named_leaves({"a": None, "b": 1}) == [("b", 1)]
    assert tree.map(lambda x: x + 1, {"a": None, "b": 1}) == {"a": None, "b": 2}
    assert tree.leaves(None) == []


def test_combine_is_the_inverse_of_partition():
    kept, others = tree.partition(lambda path, leaf: path.endswith("wk") or leaf == 0, NESTED)
    assert tree.leaves(kept) == [0, 2, 3]
    assert tree.leaves(others) == [1, 4, 5, 6, 7]
    assert tree.combine(kept, others) == tree.combine(others, kept) == NESTED


def test_the_ending_of_a_path_is_its_longest_known_one():
    known = {"layers.0.wq", "wq", "norm"}
    assert tree.ending("0.mu.layers.0.wq", known) == "layers.0.wq"
    assert tree.ending("0.mu.layers.1.wq", known) == "wq"
    assert tree.ending("norm", known) == "norm"
    assert tree.ending("0.mu.layer_norm", known) is None  # an end is whole names
    assert tree.ending("", known) is None
