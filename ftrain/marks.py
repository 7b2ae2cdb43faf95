"""Names for the phases of a layer, so that a profile of a step can tell what ran when (timeline.py reads them).

A `Gather` carries a mark (fsdp.py). The default does nothing; `marked` makes ranges of torch's profiler.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Mark = Callable[[str, str], AbstractContextManager]  # (phase, layer) -> a range, from the start of a `with` to its end

# The phases of a layer. GATHER, SCATTER and REPLICATE start what ARRIVE, SETTLE and REDUCE wait for; PACK is instead of
# the first two where there is nobody to exchange with.
FORWARD, BACKWARD, PACK = "forward", "backward", "pack"
GATHER, ARRIVE = "gather", "arrive"
SCATTER, SETTLE = "scatter", "settle"
REPLICATE, REDUCE = "replicate", "reduce"
UPDATE = "update"  # of all layers together: the optimizer, and what is derived from new parameters

PREFIX = "ftrain"
_NOTHING = nullcontext()


def unmarked(phase: str, layer: str) -> AbstractContextManager:
    """No mark at all."""
    return _NOTHING


def marked(phase: str, layer: str) -> AbstractContextManager:
    """A range named "ftrain PHASE LAYER" in whatever profile is being made."""
    import torch.profiler

    return torch.profiler.record_function(f"{PREFIX} {phase} {layer}")
