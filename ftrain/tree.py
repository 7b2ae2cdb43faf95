"""Parameter trees: nested dicts, lists and NamedTuples with tensors at the leaves.

Everything ftrain moves between steps is such a tree. optree does the work; this file adds dotted path names
(`layers.0.wq`) and errors that say which path is wrong. Dict keys are flattened in sorted order, so two trees
with the same names pair leaf by leaf whatever order they were built in. `None` is an absent subtree.
"""

from collections.abc import Callable, Container
from typing import Any

import optree

Tree = Any


def flatten(tree: Tree) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of `tree` in path order, and the structure that `unflatten` needs to put them back."""
    leaves_, treedef = optree.tree_flatten(tree)
    return leaves_, treedef


def unflatten(treedef: optree.PyTreeSpec, leaves_: list[Any]) -> Tree:
    """The inverse of `flatten`."""
    return optree.tree_unflatten(treedef, leaves_)


def leaves(tree: Tree) -> list[Any]:
    """The leaves of `tree` in path order."""
    return optree.tree_leaves(tree)


def names(tree: Tree) -> list[str]:
    """The dotted path of every leaf, in the order of `leaves`.

    Raises ValueError for a dict key that is not a string, or that holds a dot: its path would be ambiguous.
    """
    return [_dotted(accessor) for accessor in optree.tree_accessors(tree)]


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
    """(path, leaf) pairs in path order."""
    return list(zip(names(tree), leaves(tree), strict=True))


def map(fn: Callable, tree: Tree, *rest: Tree) -> Tree:  # so that tree.map reads as jax.tree.map does
    """Apply `fn(leaf, *leaves)` over trees of one structure. Raises ValueError naming the paths that differ."""
    for other in rest:
        check_same_structure(tree, other)
    return optree.tree_map(fn, tree, *rest)


def map_named(fn: Callable, tree: Tree, *rest: Tree) -> Tree:
    """Apply `fn(path, leaf, *leaves)`: `map` with the dotted path as first argument."""
    for other in rest:
        check_same_structure(tree, other)
    leaves_, treedef = flatten(tree)
    columns = [leaves(other) for other in rest]
    rows = zip(names(tree), leaves_, *columns, strict=True)
    return unflatten(treedef, [fn(*row) for row in rows])


def check_same_structure(tree: Tree, other: Tree) -> None:
    """Raise ValueError, with the paths that only one of them has, when two trees differ in structure."""
    if optree.tree_structure(tree) == optree.tree_structure(other):
        return
    a, b = set(names(tree)), set(names(other))
    if a != b:
        parts = [f"lacks {', '.join(sorted(a - b)[:8])}"] * bool(a - b)
        parts += [f"has {', '.join(sorted(b - a)[:8])} besides"] * bool(b - a)
        raise ValueError(f"the trees differ in structure: the second one {' and '.join(parts)}")
    if [type(x) for x in _containers(tree)] != [type(x) for x in _containers(other)]:
        raise ValueError("the trees name the same leaves in containers of different types (a list beside a tuple, say)")


def _containers(tree: Tree) -> list[Any]:
    seen: list[Any] = []

    def see(node: Any) -> bool:
        seen.append(node)
        return False

    optree.tree_map(lambda _: None, tree, is_leaf=see)
    return [node for node in seen if isinstance(node, (dict, list, tuple))]


def partition(keep: Callable[[str, Any], bool], tree: Tree) -> tuple[Tree, Tree]:
    """Split a tree in two of the same shape: leaves where `keep(path, leaf)`, and the others. Holes are `None`."""
    leaves_, treedef = flatten(tree)
    kept = [keep(path, leaf) for path, leaf in named_leaves(tree)]
    yes = unflatten(treedef, [x if k else None for x, k in zip(leaves_, kept, strict=True)])
    no = unflatten(treedef, [None if k else x for x, k in zip(leaves_, kept, strict=True)])
    return yes, no


def combine(first: Tree, second: Tree) -> Tree:
    """The inverse of `partition`: at every path the one that is not `None`."""
    return optree.tree_map(
        lambda a, b: b if a is None else a, first, second, is_leaf=lambda x: x is None, none_is_leaf=True
    )


def ending(path: str, among: Container[str]) -> str | None:
    """The longest end of a dotted path that is one of `among`, or None: of "0.mu.layers.0.wq" "layers.0.wq"."""
    while path and path not in among:
        _, _, path = path.partition(".")
    return path or None


def _dotted(accessor: optree.PyTreeAccessor) -> str:
    parts: list[str] = []
    for entry in accessor:
        name = entry.field if isinstance(entry, optree.NamedTupleEntry) else entry.entry
        is_index = isinstance(entry, optree.SequenceEntry) and isinstance(name, int)
        if not is_index and (not isinstance(name, str) or "." in name):
            where = f" under {'.'.join(parts)}" if parts else ""
            raise ValueError(
                f"tree keys must be strings without dots; {name!r} (a {type(name).__name__}){where} is not"
            )
        parts.append(str(name))
    return ".".join(parts)
