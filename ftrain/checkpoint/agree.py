"""Every rank or none: a step that fails on one rank raises the same error on all of them, and nobody hangs.

Each function runs `fn` where it should, then exchanges the outcome. Without a process group they just run
`fn`. `doing` completes the sentence "cannot ...". A peer that dies breaks the exchange itself: gloo notices
at once, NCCL after its timeout, and that too becomes a CheckpointError.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ftrain.errors import FtrainError


class CheckpointError(FtrainError, RuntimeError):
    """A checkpoint could not be written or read; the message is a sentence for the user."""

    exit_code = 1


def rank_and_size(group: Any = None) -> tuple[int, int]:
    """This process's rank in `group` (None: the default one) and the number of ranks; (0, 1) without any."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1


def each(doing: str, fn: Callable[[], Any], group: Any = None) -> list[Any]:
    """Run `fn` on every rank. Returns all results on rank 0, none elsewhere; raises on all if one raised."""
    rank, size = rank_and_size(group)
    value, error = _outcome(fn)
    outcomes: list[Any] = [(value, _sentence(error))]
    if size > 1:
        with _peers(doing):
            all_outcomes: list[Any] | None = [None] * size if rank == 0 else None
            dist.gather_object(outcomes[0], all_outcomes, group=group, group_dst=0)
            outcomes = all_outcomes or []
            shared = [joined([message for _, message in outcomes]) if rank == 0 else None]
            dist.broadcast_object_list(shared, group=group, group_src=0)
        message = shared[0]
    else:
        message = outcomes[0][1]
    if message:
        raise CheckpointError(f"cannot {doing}: {message}") from error
    return [value for value, _ in outcomes]


def first(doing: str, fn: Callable[[], Any], group: Any = None) -> Any:
    """Run `fn` on rank 0. Returns its result on every rank, or raises its error on every rank."""
    rank, size = rank_and_size(group)
    value, error = _outcome(fn) if rank == 0 else (None, None)
    shared = [(value, _sentence(error))]
    if size > 1:
        with _peers(doing):
            dist.broadcast_object_list(shared, group=group, group_src=0)
    return _unwrap(doing, shared[0], error)


def deal(doing: str, fn: Callable[[], list[Any]], group: Any = None) -> Any:
    """Run `fn` on rank 0: a list with an item per rank. Returns each rank's own, or raises on every rank."""
    rank, size = rank_and_size(group)
    values, error = _outcome(fn) if rank == 0 else (None, None)
    hand: list[Any] = [(None, _sentence(error))] * size if values is None else [(value, None) for value in values]
    mine = [hand[0]]
    if size > 1:
        with _peers(doing):
            dist.scatter_object_list(mine, hand if rank == 0 else None, group=group, group_src=0)
    return _unwrap(doing, mine[0], error)


def _outcome(fn: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return fn(), None
    except Exception as error:
        return None, error


def _sentence(error: Exception | None) -> str | None:
    if error is None or isinstance(error, CheckpointError):
        return str(error) if error else None
    return f"{type(error).__name__}: {error}"


def joined(messages: list[str | None]) -> str | None:
    """One sentence for all ranks: plain if every rank says the same, else with the ranks in front."""
    failed = {rank: message for rank, message in enumerate(messages) if message}
    if len(failed) == len(messages) and len(set(failed.values())) == 1:
        return messages[0]
    shown = [f"rank {rank}: {message}" for rank, message in list(failed.items())[:4]]
    more = f"; and {len(failed) - 4} more ranks" if len(failed) > 4 else ""
    return "; ".join(shown) + more if failed else None


def _unwrap(doing: str, outcome: tuple[Any, str | None], error: Exception | None) -> Any:
    value, message = outcome
    if message:
        raise CheckpointError(f"cannot {doing}: {message}") from error
    return value


@contextmanager
def _peers(doing: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"cannot {doing}: a rank was lost ({str(error).splitlines()[0]})") from error
