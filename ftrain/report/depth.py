"""Deep models are rehearsed shallow: each further layer of a make does what the last one did.

A step is linear in its layers. Calls and bytes of a deep model follow exactly from those at one and at three layers.
The peak of memory is where the backward of a make of layers begins or ends, and either end is linear too.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import NamedTuple

from ftrain import tree
from ftrain.fold import kept_layers
from ftrain.recipe import Recipe
from ftrain.report.rehearsal import GATHERED, MICRO_BATCHES, PerElement, Rehearsal, rehearse
from ftrain.run import Run

WHOLE = 4  # models of up to so many layers are rehearsed whole


class Make(NamedTuple):
    """What layers have in common: which of their weights fp8 runs, and whether residuals are kept."""

    in_fp8: frozenset[str]
    kept: bool


class Growth(NamedTuple):
    """A make rehearsed at one layer and at `depth` layers."""

    one: Rehearsal
    some: Rehearsal
    depth: int

    def of(self, part: Callable[[Rehearsal], Counter]) -> dict:
        """What each further layer adds to a part."""
        one, some = part(self.one), part(self.some)
        return {key: Fraction(some[key] - one[key], self.depth - 1) for key in {*some, *one}}

    def at(self, part: Callable[[Rehearsal], Counter], layers: int, each: dict | None = None) -> Counter:
        """A part at so many layers; `each`: what a layer adds, if not what it added here."""
        return plus(part(self.some), layers - self.depth, self.of(part) if each is None else each)


def rehearse_deep(recipe: Recipe, run: Run, rank: int = 0, calls_only: bool = False) -> Rehearsal:
    """`rehearse`, for a model of any depth. run: the recipe's own, on a mesh of the shape that is asked for.

    Communication is exact. For memory, layers that differ in what fp8 runs count as the most frequent of them.
    calls_only: memory is not asked for, which takes half the time.
    """
    makes = makes_of(run)
    # Memory needs three layers, the first that is pulled back, the last and one between them; and a third micro-batch.
    depth, most = (2, 2) if calls_only else (3, MICRO_BATCHES)
    if sum(makes.values()) <= WHOLE:
        return rehearse(recipe, run.mesh_shape, rank, most)

    def at(make: Make, depth: int) -> Rehearsal:
        return rehearse(shallow(recipe, run, make, depth), run.mesh_shape, rank, most)

    grown = {make: Growth(at(make, 1), at(make, depth), depth) for make in makes}
    main = max(makes, key=makes.__getitem__)
    counts, sent = grown[main].at(lambda r: r.counts, makes[main]), grown[main].at(lambda r: r.sent, makes[main])
    for make in makes:
        if make != main:
            counts = plus(counts, makes[make], grown[make].of(lambda r: r.counts))
            sent = plus(sent, makes[make], grown[make].of(lambda r: r.sent))
    frequent = {make.kept: grown[make] for make in sorted(makes, key=makes.__getitem__)}
    n, kept = sum(makes.values()), kept_layers(recipe.train.remat, sum(makes.values()))
    per_element = {path: _of_a_layer(path, grown[main].some) for path in tree.names(run.abstract)}
    memory = _memory(frequent, {True: kept, False: n - kept})
    return replace(memory, counts=+counts, sent=+sent, per_element=per_element)


def makes_of(run: Run) -> dict[Make, int]:
    """How many layers there are of each make. A layer is what lies under one number of "layers."."""
    layers: dict[int, set[str]] = {}
    for path in tree.names(run.abstract):
        if path.startswith("layers."):
            _, number, name = path.split(".", 2)
            in_fp8 = layers.setdefault(int(number), set())
            if run.execution.fp8.runs(path):
                in_fp8.add(name)
    first_kept = len(layers) - kept_layers(run.recipe.train.remat, len(layers))
    return dict(Counter(Make(frozenset(names), number >= first_kept) for number, names in layers.items()))


def shallow(recipe: Recipe, run: Run, make: Make, depth: int) -> Recipe:
    """The recipe with `depth` layers, all of one make."""
    skip, some_run = [], False
    for path in tree.names(run.abstract):
        name = path.split(".", 2)[2] if path.startswith("layers.") else None
        runs = run.execution.fp8.runs(path) if name is None else name in make.in_fp8
        some_run = some_run or runs
        if not runs and any(fnmatchcase(path, glob) for glob in run.execution.fp8.weights):
            skip.append(path if name is None else f"layers.*.{name}")
    fp8 = replace(recipe.fp8, skip=tuple(dict.fromkeys(skip)))
    return replace(
        recipe,
        model=replace(recipe.model, hf=None, n_layers=depth),
        fp8=fp8 if some_run else replace(fp8, recipe="none"),
        train=replace(recipe.train, remat="none" if make.kept else "full"),
    )


def _memory(grown: dict[bool, Growth], layers: dict[bool, int]) -> Rehearsal:
    """The memory of a stack: `layers[False]` whose inputs alone are saved, below `layers[True]` that keep all.

    Before a layer is pulled back, what the layers below it saved is alive, and the gradients of those above.
    """
    saved = {kept: growth.of(lambda r: r.saved) for kept, growth in grown.items()}
    done = {kept: growth.of(lambda r: r.done) for kept, growth in grown.items()}
    start = {kept: growth.of(lambda r: r.start) for kept, growth in grown.items()}
    forward, backward = [], []
    for kept, growth in grown.items():
        here, others = layers[kept], layers[not kept]
        # The kept layers run last, when the inputs of the others are saved, and are pulled back first.
        before, after = (saved.get(False, {}),) * 2 if kept else (start.get(True, {}), done.get(True, {}))
        begin_or_end = max(saved[kept], done[kept], key=lambda added: sum(added.values()))
        forward.append(plus(growth.at(lambda r: r.forward, here, saved[kept]), others, before))
        backward.append(plus(growth.at(lambda r: r.backward, here, begin_or_end), others, after))
    kept, growth = next(iter(grown.items()))
    here, others = layers[kept], layers[not kept]

    def whole(part: Callable[[Rehearsal], Counter], each: dict[bool, dict]) -> Counter:
        return plus(growth.at(part, here, each[kept]), others, each.get(not kept, {}))

    # Of what comes and goes, only gathered weights can grow with depth: where they are kept for the backward.
    most = {k: {GATHERED: saved[k].get(GATHERED, 0)} for k in grown}
    return replace(
        growth.some,
        start=whole(lambda r: r.start, start),
        saved=whole(lambda r: r.saved, saved),
        done=whole(lambda r: r.done, done),
        forward=max(forward, key=Counter.total),
        backward=max(backward, key=Counter.total),
        most=whole(lambda r: r.most, most),
    )


def _of_a_layer(path: str, shallow_one: Rehearsal) -> PerElement:
    """What a shallow rehearsal found for the parameter at `path` of the deep model: that of the first layer."""
    if path.startswith("layers."):
        path = f"layers.0.{path.split('.', 2)[2]}"
    return shallow_one.per_element[path]


def plus(start: Counter, times: int, each: dict) -> Counter:
    """start + times * each, in whole numbers."""
    result = start.copy()
    for key, value in each.items():
        result[key] += int(times * value)
    return result
