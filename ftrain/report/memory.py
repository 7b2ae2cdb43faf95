"""What one rank holds at most in a step, and what of it is known exactly."""

from dataclasses import dataclass

from ftrain.report.layout import Row
from ftrain.report.rehearsal import (
    ACTIVATIONS,
    BACKWARD,
    FP8_STATE,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    UNDER_WAY,
    Rehearsal,
)


@dataclass(frozen=True)
class Part:
    """Bytes of one kind: how many at most, and how many when the whole is at its peak.

    exact: they follow from the layout alone. Else they are read off a rehearsal, and what kernels use inside, the
    allocator's rounding and the transport's own buffers come on top.
    """

    what: str
    most: int
    at_peak: int
    exact: bool


@dataclass(frozen=True)
class Memory:
    """The memory of one rank, in parts; `peak` is the sum of what is alive when the most is."""

    parts: tuple[Part, ...]
    peak: int


WHAT = {
    PARAMETERS: "parameters",
    GRADIENTS: "gradients",
    OPTIMIZER: "optimizer state",
    FP8_STATE: "fp8 state",
    GATHERED: "gathered weights",
    UNDER_WAY: "gradients of single layers, under way",
    ACTIVATIONS: "activations kept for the backward",
    LOGITS: "logits and loss",
    BACKWARD: "backward of one layer",
    OTHER: "batch, tables and the rest",
}


def memory(rehearsal: Rehearsal, rows: list[Row], alike: bool = True) -> Memory:
    """The memory of the rank that was rehearsed and whose layout the rows are. alike: all layers gather the same."""
    peak = rehearsal.peak
    most = {
        PARAMETERS: sum(row.parameter_bytes for row in rows),
        GRADIENTS: sum(row.gradient_bytes for row in rows),
        OPTIMIZER: sum(row.optimizer_bytes for row in rows),
        FP8_STATE: rehearsal.start[FP8_STATE],
        GATHERED: rehearsal.most[GATHERED],
        UNDER_WAY: rehearsal.most[UNDER_WAY],
        ACTIVATIONS: rehearsal.saved[ACTIVATIONS],
        LOGITS: rehearsal.most[LOGITS],
        BACKWARD: rehearsal.most[BACKWARD],
        OTHER: rehearsal.most[OTHER],
    }
    exact = (PARAMETERS, GRADIENTS, OPTIMIZER, FP8_STATE, *((GATHERED,) if alike else ()))
    for kind in WHAT:
        if kind not in exact:  # at the peak of the forward, the layer that runs has activations that it will not keep
            most[kind] = max(most[kind], peak[kind])
    parts = tuple(Part(WHAT[kind], most[kind], peak[kind], kind in exact) for kind in WHAT)
    return Memory(parts, peak.total())
