"""How a model is run: on which mesh, in which dtypes, compiled or not, what is kept and what is run again.

A model knows what it computes and asks an `Execution` for the rest: the gathers of its parameters, its linear layers
and the compiler. Only fp8 changes results beyond rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ftrain import fp8, tree
from ftrain.collectives import all_reduce_max
from ftrain.fp8.use import Fp8
from ftrain.fsdp import Gather, make_gather
from ftrain.linear import Linear, make_linear
from ftrain.marks import Mark, unmarked
from ftrain.sharding import COMPUTE_RULES, STORED_RULES, Mesh, Rule, plan
from ftrain.transforms import jit

LOGITS_BYTES = 1 << 32  # fp32 logits that one chunk of the loss may take on a rank


@dataclass(frozen=True)
class Execution:
    """Everything about a run of a model that is not its mathematics. The default is one rank, eager, fp32."""

    mesh: Mesh = Mesh()
    compute_dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype | None = None  # of gathered weights; None: compute_dtype
    reduce_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True
    remat: str | float = "none"
    compile: bool = False
    loss_chunks: int = 0  # pieces the sequence is cut in for the loss; 0: as few as LOGITS_BYTES allows
    fp8: Fp8 = Fp8()
    watch: Callable[[Linear], Linear] | None = None  # around the products, to see what passes through (parity.py)
    rules: tuple[tuple[Rule, ...], tuple[Rule, ...]] = (COMPUTE_RULES, STORED_RULES)
    mark: Mark = unmarked  # names the phases of each layer, for a profile (marks.py)

    def plans(self, abstract: Any) -> Any:
        """The layout of every parameter (sharding.Plan). Raises ShardingError for a layout that cannot work."""
        return plan(abstract, self.mesh.shape, *self.rules)

    def gather(self, abstract: Any, plans: Any, paths: Any, *, products: bool = True) -> Gather:
        """The gather of layers shaped like `abstract`, laid out by `plans`, at `paths`: parts of the model's trees.

        products: the layer multiplies with these weights, in fp8 where that is asked for; an embedding does not.
        """
        operand = fp8.wire_operand(self.fp8.recipe)
        return make_gather(
            abstract,
            plans,
            self.mesh,
            paths=paths,
            compute_dtype=self.compute_dtype,
            wire_dtype=self.wire_dtype,
            reduce_dtype=self.reduce_dtype,
            keep=not self.reshard_after_forward,
            fp8=self.fp8.wire if products else lambda path: (None, False),
            cast=self._cast,
            power_of_two=operand is not None and operand.power_of_two,
            mark=self.mark,
        )

    def prepare(self, params: Any) -> Any:
        """`params` as all micro-batches of a step share them: in the compute dtype where each would cast and keep them
        (nothing travels, nothing is in fp8, reshard_after_forward is false), else as they are."""
        if self.reshard_after_forward or self.mesh.group("shard") is not None or self.fp8.recipe.is_fp8:
            return params
        return tree.map(lambda param: param.to(self.compute_dtype), params)

    def post(self, abstract: Any) -> tuple[Callable, ...]:
        """The transforms that run wherever parameters are made (fp8.make_post); none where nothing is kept."""
        world, in_fp8 = self.mesh.world, self.fp8
        operand = fp8.wire_operand(in_fp8.recipe)
        transform = fp8.make_post(
            in_fp8.recipe,
            abstract,
            in_fp8.runs,
            precompute=in_fp8.precompute_scales,
            cache=in_fp8.cache_shards,
            codes_travel=in_fp8.all_gather and operand is not None,
            wire_dtype=self.wire_dtype or self.compute_dtype,
            all_reduce_max=None if world is None else lambda x: all_reduce_max(x, world),
            cast=self._cast,
        )
        return () if transform is None else (transform,)

    @cached_property
    def linear(self) -> Linear:
        """The products of a block."""
        linear = make_linear(self.fp8.recipe, self.mesh.group("tensor"))
        return linear if self.watch is None else self.watch(linear)

    @cached_property
    def _cast(self) -> Callable:
        # Eager, the cast is five passes over the weight; on a GPU that costs more than fp8 wins.
        return jit(fp8.cast) if self.compile and self.mesh.device.type == "cuda" else fp8.cast

    def jit(self, fn: Callable) -> Callable:
        """`fn`, compiled if this execution compiles."""
        return jit(fn) if self.compile else fn

    def loss_chunk(self, x_BSD: torch.Tensor, vocab_size: int) -> int:
        """How many positions of this rank's sequence one chunk of the loss takes."""
        batch, seq = x_BSD.shape[:2]
        chunks = self.loss_chunks or -(-batch * seq * vocab_size * 4 // LOGITS_BYTES)
        return -(-seq // max(1, min(chunks, seq)))
