"""SIGINT and SIGTERM as a question that the loop asks between two steps, with one answer on all ranks."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

# A signal that comes again so soon is the same one. Slurm signals every process of a job, and torchrun, one of them,
# passes it on; a terminal's Ctrl-C does the like.
SAME_SECONDS = 2.0


@contextmanager
def stop_requests(world_size: int) -> Iterator[Callable[[], int]]:
    """Within it the two signals do not end the process; what it yields gives the signal received, or 0.

    The call is a collective: a signal to any one rank is the answer on all. A second signal, SAME_SECONDS after the
    first, does what it would have done before. Outside the main thread, where Python delivers no signals, the answer
    is that of the other ranks.
    """
    received, at = 0, 0.0
    before: dict[int, Any] = {}  # signal -> handler

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def note(signum: int, _frame: FrameType | None) -> None:
        nonlocal received, at
        if not received:
            received, at = signum, time.monotonic()
        elif time.monotonic() - at >= SAME_SECONDS:
            restore()
            signal.raise_signal(signum)

    def asked() -> int:
        if world_size == 1:
            return received
        answer = torch.tensor([received])
        dist.all_reduce(answer, dist.ReduceOp.MAX)
        return int(answer)

    if threading.current_thread() is threading.main_thread():
        before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        restore()
