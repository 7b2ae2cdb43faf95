"""What of a model runs in fp8: which weights, how, what of them travels; and what a machine makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from ftrain import tree
from ftrain.sharding import MeshShape, local_shape

from .check import check
from .formats import E4M3, FORMATS
from .matmul import padding
from .parse import parse
from .recipes import NONE, Recipe, wire_operand


@dataclass(frozen=True)
class Fp8:
    """Which weights fp8 multiplies, how, and what of it travels and is kept. The default is no fp8."""

    recipe: Recipe = NONE
    weights: tuple[str, ...] = ()  # globs over parameter paths: the weights of products
    skip: tuple[str, ...] = ()  # globs over parameter paths that stay in high precision
    all_gather: bool = True  # codes travel, where the recipe has one form of a weight for all its uses
    precompute_scales: bool = False
    cache_shards: bool = False

    def why_not(self, path: str) -> str | None:
        """Why the parameter at `path` is not multiplied in fp8, in a few words; None where it is."""
        if not any(fnmatchcase(path, glob) for glob in self.weights):
            return "no weight of a product"
        if not self.recipe.is_fp8:
            return f"fp8.recipe = {self.recipe.name!r}"
        glob = next((glob for glob in self.skip if fnmatchcase(path, glob)), None)
        return None if glob is None else f"fp8.skip = {glob!r}"

    def runs(self, path: str) -> bool:
        """Whether the weight at `path` is multiplied in fp8."""
        return self.why_not(path) is None

    def wire(self, path: str) -> tuple[torch.dtype | None, bool]:
        """(the fp8 format of the weight at `path`, or None; whether its codes travel)."""
        if not self.runs(path):
            return None, False
        operand = wire_operand(self.recipe)
        if operand is None:
            return E4M3, False
        return FORMATS[operand.format], self.all_gather

    @property
    def knows_scales(self) -> bool:
        """Whether a weight's scale is known before it is gathered: precomputed, or from its history."""
        operand = wire_operand(self.recipe)
        return operand is not None and (self.precompute_scales or operand.scale == "history")

    def problems(
        self,
        paths: list[str],
        device: str | None = None,
        capability: tuple[int, int] | None = None,
        tensor: int = 1,
    ) -> list[str]:
        """What cannot work, or would do nothing, as sentences.

        paths: of all parameters. device, capability, tensor: as `check` takes them.
        """
        if not self.recipe.is_fp8:
            return []
        problems = check(self.recipe, self.all_gather, self.precompute_scales, device, capability, tensor)
        weights = [p for p in paths if any(fnmatchcase(p, glob) for glob in self.weights)]
        there = f"there are {', '.join(folded(weights))}"
        problems += [
            f"fp8.skip: {glob!r} matches no weight that fp8 could run; {there}."
            for glob in self.skip
            if not any(fnmatchcase(path, glob) for path in weights)
        ]
        if weights and not any(self.runs(path) for path in weights):
            problems.append(
                f"fp8.skip = {list(self.skip)} leaves no weight to run in fp8 ({there}): skip fewer, or set "
                'fp8.recipe = "none".'
            )
        if self.cache_shards and not (self.all_gather and self.knows_scales):
            problems.append(
                "fp8.cache_shards = true keeps the codes that travel: it needs fp8.all_gather = true, and a "
                "scale that is known beforehand, from fp8.precompute_scales = true or a history."
            )
        return problems

    def notes(self, abstract: Any, plans: Any, mesh: MeshShape, device: str, tokens: int, compiled: bool) -> list[str]:
        """What fp8 does here and what the machine changes about it, a sentence each; none without fp8.

        abstract, plans: trees of Param and sharding.Plan. device: "cpu" or "cuda". tokens: of a micro-batch.
        """
        named = tree.named_leaves(abstract)
        local = {
            path: local_shape(param.shape, plan.compute, mesh, 0)
            for (path, param), plan in zip(named, tree.leaves(plans), strict=True)
        }
        runs = [path for path in local if self.runs(path)]
        weights = [path for path in local if any(fnmatchcase(path, glob) for glob in self.weights)]
        if not runs:
            return []
        lines = [f"fp8 {self.recipe.name}: {len(runs)} of {len(weights)} weights; {self._wire_note(mesh.shard)}"]
        if device != "cuda":
            return [*lines, "fp8 on the CPU is for its numbers: products in float32 are faster here"]
        if not compiled:
            lines.append(
                "fp8 without train.compile: scales and casts are passes over memory that cost more than fp8 wins"
            )
        odd: dict[tuple[int, ...], list[str]] = {}
        for path in runs:
            if padded(local[path]) != local[path]:
                odd.setdefault(local[path], []).append(path)
        lines += [
            f"fp8 pads {', '.join(folded(paths))} from {shape} on a rank to {padded(shape)} in its products"
            for shape, paths in odd.items()
        ]
        if padding(tokens) and self.recipe.grad_weight:
            lines.append(f"fp8 pads {tokens} tokens to {tokens + padding(tokens)} in the products of weight gradients")
        return lines

    def _wire_note(self, shards: int) -> str:
        """How fp8 weights travel between `shards` ranks, and when their scales are made."""
        if shards == 1:
            wire = "one shard, so no weight travels"
        elif self.all_gather:
            wire = "their codes travel"
        else:
            wire = "they travel in high precision and are cast on arrival"
        made = "scales and codes" if self.cache_shards else "scales"
        return f"{wire}; {made} are made once a step" if self.knows_scales else wire


def use(options: Any, weights: tuple[str, ...]) -> Fp8:
    """The [fp8] table of a recipe, for a model whose products use `weights`. ValueError as of `parse`."""
    return Fp8(
        parse(options.recipe),
        weights,
        options.skip,
        options.all_gather,
        options.precompute_scales,
        options.cache_shards,
    )


def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape (N, K) that a rank's weight has inside its products on CUDA: zeros up to multiples of 16."""
    return tuple(size + padding(size) for size in shape)


def starred(path: str) -> str:
    """A path with the layer's number as a star: "layers.*.wq"."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def folded(paths: list[str]) -> list[str]:
    """Paths with the layer's number as a star, each once."""
    return list(dict.fromkeys(starred(path) for path in paths))
