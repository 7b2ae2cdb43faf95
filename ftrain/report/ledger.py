"""What a stretch of code allocates and communicates, written down while it runs.

A `Ledger` is a mode: every operation passes it on the way to its kernel. It notes each new storage with its size and
its maker, when each is freed, and each collective. Real tensors and fake ones are noted alike.
"""

import sys
import weakref
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftrain.report.planned import axis_of

PACKAGE = Path(__file__).parents[1]
REPORT = Path(__file__).parent

_KINDS = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
}
_NO_CALLS = ("wait_tensor", "_wrap_tensor_autograd")

# What a compiler cannot fuse into its neighbours: their operands and results are in memory, whatever is compiled.
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "embedding", "embedding_dense_backward")
_SUMS = ("add",)  # of whole tensors: the residual stream, which several layers read


class Call(NamedTuple):
    """One collective: what, over which axis, in which dtype, the bytes this rank puts in, and who called it."""

    op: str
    axis: str
    dtype: torch.dtype
    nbytes: int
    makers: tuple[str, ...]


class Change(NamedTuple):
    """A storage that came (bytes above 0) or went."""

    storage: int
    nbytes: int


class Ledger(TorchDispatchMode):
    """Use as a context. `changes` and `calls` are in the order in which they happened. `solid` are the storages that
    a product, attention or a collective reads or writes: those that exist in compiled code too.

    Makers are the names of ftrain's functions on the stack, innermost first, such as "fsdp.Gather.start".
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under a ledger, and to be skipped costs an import of half a second

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Change] = []
        self.calls: list[Call] = []
        self.makers: list[tuple[str, ...]] = []  # of each storage
        self.solid: set[int] = set()
        self._alive: dict[int, tuple[int, weakref.ref]] = {}  # address -> (storage, something that tells when it goes)

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if op.namespace in ("c10d", "_c10d_functional") and op._opname not in _NO_CALLS:
            self._note_call(op, args)
        result = op(*args, **(kwargs or {}))
        made = list(_tensors((result,)))
        for tensor in made:
            self._note(tensor, args)
        if op.namespace != "aten" or op._opname in _PRODUCTS or "attention" in op._opname:
            made += _tensors(args)
        elif op._opname not in _SUMS:
            made = []
        self.solid.update(number for tensor in made if (number := self.number_of(tensor)) is not None)
        return result

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number in `changes` of a tensor's storage, or None if it is from before the ledger."""
        known = self._alive.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    def _note(self, tensor: torch.Tensor, args: Any) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive or any(arg.untyped_storage()._cdata == address for arg in _tensors(args)):
            return  # the second: a view of something from before the ledger
        number, nbytes = len(self.makers), storage.nbytes()

        def gone(_: Any) -> None:
            del self._alive[address]
            self.changes.append(Change(number, -nbytes))

        self._alive[address] = number, weakref.ref(storage, gone)
        self.makers.append(makers())
        self.changes.append(Change(number, nbytes))

    def _note_call(self, op: Any, args: tuple) -> None:
        tensors = list(_tensors(args))
        # In-place forms of gather and scatter take the output first; what a rank puts in is the other one.
        sent = tensors[1] if op._opname in ("_allgather_base_", "_reduce_scatter_base_") else tensors[0]
        axis = next((axis for arg in args if (axis := axis_of(arg)) is not None), "")
        kind = _KINDS.get(op._opname, op._opname)
        self.calls.append(Call(kind, axis, sent.dtype, sent.numel() * sent.element_size(), makers()))


def makers() -> tuple[str, ...]:
    """The functions of ftrain, but for this report's own, that are running now, innermost first."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (name := _name(frame.f_code)) is not None:
            names.append(name)
        frame = frame.f_back
    return tuple(names)


@cache
def _name(code: CodeType) -> str | None:
    file = Path(code.co_filename)
    ours = file.is_relative_to(PACKAGE) and not file.is_relative_to(REPORT)
    return f"{file.stem}.{code.co_qualname}" if ours else None


def _tensors(args: Any) -> Iterable[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (tuple, list)):
            yield from _tensors(arg)
