"""How a model is run: on which mesh, in which dtypes, compiled or not, what is kept and what is run again.

A model knows what it computes and asks an `Execution` for the rest: the gathers of its parameters, its linear layers
and the compiler. None of it changes results beyond rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ftrain.fsdp import Gather, make_gather
from ftrain.linear import Linear, high_precision
from ftrain.sharding import COMPUTE_RULES, STORED_RULES, Mesh, Rule, plan
from ftrain.transforms import jit

LOGITS_BYTES = 1 << 31  # fp32 logits that one chunk of the loss may take on a rank


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
    rules: tuple[tuple[Rule, ...], tuple[Rule, ...]] = (COMPUTE_RULES, STORED_RULES)

    def plans(self, abstract: Any) -> Any:
        """The layout of every parameter (sharding.Plan). Raises ShardingError for a layout that cannot work."""
        return plan(abstract, self.mesh.shape, *self.rules)

    def gather(self, abstract: Any, plans: Any, prefix: str = "") -> Gather:
        """The gather of layers shaped like `abstract` and laid out by `plans`, parts of the model's trees at `prefix`."""
        return make_gather(
            abstract,
            plans,
            self.mesh,
            prefix=prefix,
            compute_dtype=self.compute_dtype,
            wire_dtype=self.wire_dtype,
            reduce_dtype=self.reduce_dtype,
            keep=not self.reshard_after_forward,
        )

    @cached_property
    def linear(self) -> Linear:
        """The products of a block."""
        return high_precision(self.mesh.group("tensor"))

    def jit(self, fn: Callable) -> Callable:
        """`fn`, compiled if this execution compiles."""
        return jit(fn) if self.compile else fn

    def loss_chunk(self, x_BSD: torch.Tensor, vocab_size: int) -> int:
        """How many positions of this rank's sequence one chunk of the loss takes."""
        batch, seq = x_BSD.shape[:2]
        chunks = self.loss_chunks or -(-batch * seq * vocab_size * 4 // LOGITS_BYTES)
        return -(-seq // max(1, min(chunks, seq)))
