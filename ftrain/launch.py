"""Who am I, and how do processes start.

A plain start is one rank. torchrun, or anything that sets its environment variables, starts many; so does
`--nproc`, which is spawn.py.
"""

import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ftrain.errors import FtrainError
from ftrain.recipe import Parallel

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RESTARTS = "TORCHELASTIC_RESTART_COUNT"

RENDEZVOUS_SECONDS = 45.0  # for all ranks to find each other

# What is said, in lower case, of a peer that is gone or hangs: by gloo of a pair, by NCCL of a communicator or of its
# sockets, by torch's store of the process that holds it. "Bootstrap : no socket interface found" is none of these.
_CONNECTION = ("connection closed by", "connection reset by peer", "connection refused", "broken pipe")
_GLOO = (
    *_CONNECTION,
    "timed out waiting",
    "application timeout caused pair closure",
    "connect timeout",
    "timed out connecting",
)
_NCCL = (*_CONNECTION, "remote process exited", "communicator was aborted", "collective operation timeout")
_STORE = (
    "connection was likely closed",
    "socket has timed out",
    "socket timeout",
    "wait timeout after",
    "failed on socket",
)

LOST_PEER = 3  # the exit code of a rank that ended only because another one did


class LaunchError(FtrainError, ValueError):
    """Processes that cannot be started, or cannot find each other, in a sentence."""


@dataclass(frozen=True)
class World:
    """This process among all ranks, and its number among those of its machine.

    master: the address where rank 0 listens. restarts: how often torchrun has started these ranks again.
    local_size: how many ranks are on this machine, as far as is known.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master: str = ""
    restarts: int = 0
    local_size: int = 1


def world_from_env(environ: Mapping[str, str]) -> World:
    """The World that torchrun's variables describe; one rank where none of them says who we are.

    MASTER_ADDR and MASTER_PORT alone, which some machines always set, do not. Raises LaunchError when some
    are missing, are not numbers, or do not fit each other.
    """
    given = [name for name in VARIABLES if environ.get(name)]
    if not set(given) - {"MASTER_ADDR", "MASTER_PORT"}:
        return World()
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise LaunchError(
            f"{listed(given)} {_is_are(given)} set but {listed(missing)} {_is_are(missing)} not: one of "
            f"many ranks needs all of {listed(VARIABLES)}, as torchrun sets them. To run as one process, "
            f"unset {listed(given)}."
        )
    numbers = {name: whole(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    rank, world_size, local_rank = numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"]
    local_size = whole(environ, "LOCAL_WORLD_SIZE") if environ.get("LOCAL_WORLD_SIZE") else None
    for name, value, limit in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, local_size or local_rank + 1)):
        if value >= limit:
            size = "WORLD_SIZE" if name == "RANK" else "LOCAL_WORLD_SIZE"
            raise LaunchError(f"{name}={value} with {size}={limit}: expected {name} between 0 and {limit - 1}.")
    master = f"{environ['MASTER_ADDR']}:{numbers['MASTER_PORT']}"
    restarts = whole(environ, RESTARTS) if environ.get(RESTARTS) else 0
    return World(rank, world_size, local_rank, master, restarts, local_size or 1)


def check_world(parallel: Parallel, world: World, command: str) -> str | None:
    """What to type instead, where [parallel] wants several ranks and a plain start made one; else None.

    command: the words after `ftrain`, such as "train debug".
    """
    degrees, needed = parallel.degrees, parallel.fewest
    if world.world_size > 1 or needed == 1:
        return None
    layout = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
    multiple = "a multiple of " if -1 in degrees.values() else ""
    return (
        f"parallel: {layout} needs {multiple}{needed} processes, and a plain start has 1; use\n"
        f"  ftrain {command} --nproc {needed}\n"
        f"or, on several machines,\n"
        f"  torchrun --nproc-per-node {needed} -m ftrain.cli {command}"
    )


def init_process_group(
    world: World, device: "torch.device", timeout: float = Parallel.timeout, rendezvous: float = RENDEZVOUS_SECONDS
) -> None:
    """Join the other ranks: NCCL on GPUs (and gloo beside it, for what lies in host memory), gloo elsewhere.

    One rank needs no group, and none is made. timeout: seconds for one collective: long, as a peer may be compiling;
    rendezvous: seconds for all to come. Raises LaunchError, within these, when the port is taken or not all come.
    """
    if world.world_size == 1:
        return
    import torch
    import torch.distributed as dist

    cuda = device.type == "cuda"
    if cuda:
        if device.index >= torch.cuda.device_count():
            raise LaunchError(
                f"local rank {world.local_rank} needs a GPU of its own, but this machine has "
                f"{torch.cuda.device_count()}; start at most that many ranks here."
            )
        torch.cuda.set_device(device)
    store = _meet(world, rendezvous)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            # torchrun keeps its store over a restart: there the ranks that are gone have left their addresses.
            store=dist.PrefixStore(f"ftrain {world.restarts} {world.world_size}", store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if cuda else None,
        )
    except RuntimeError as error:
        name = str(error).rpartition("Unable to find address for: ")[2] if "gloo" in str(error) else ""
        if not name or name == str(error):
            raise
        there = ", ".join(interface for _, interface in socket.if_nameindex())
        raise LaunchError(
            f"GLOO_SOCKET_IFNAME={name.strip()}: this machine has no network interface of that name with an address; "
            f"it has {there}."
        ) from error


@contextmanager
def process_group(world: World, device: "torch.device", timeout: float = Parallel.timeout) -> Iterator[None]:
    """`init_process_group` for the span of a `with`. A group that the caller has made is left alone."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    init_process_group(world, device, timeout)
    yield
    # Not after an exception: leaving in good order may wait for a peer that is gone.
    if dist.is_initialized():
        dist.destroy_process_group()


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception, or one it was raised from, says that another rank went away, not that something
    is wrong on this one."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    signs = (_GLOO if "gloo" in text else ()) + (_NCCL + _STORE if isinstance(error, dist.DistError) else ())
    if any(sign in text for sign in signs):
        return True
    return error.__cause__ is not None and is_lost_peer(error.__cause__)


def _meet(world: World, seconds: float) -> "Store":
    """The store through which ranks find each other, or LaunchError within `seconds`.

    In a thread: a client that reached a port of some other program waits for an answer for ever, whatever its timeout.
    """
    import torch.distributed as dist

    outcome: list[Store | Exception] = []

    def meet() -> None:
        try:
            outcome.append(next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))[0])
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    thread.join(seconds + 5)
    store = outcome[0] if outcome else TimeoutError()
    if not isinstance(store, Exception):
        return store
    if "EADDRINUSE" in str(store):
        raise LaunchError(port_taken(int(world.master.rpartition(":")[2]))) from store
    raise LaunchError(
        f"rank {world.rank} of {world.world_size} did not find the other ranks at MASTER_ADDR:MASTER_PORT "
        f"{world.master} within {seconds:g} s. A rank has not started, or that port is another "
        "program's."
    ) from store


def port_taken(port: int) -> str:
    """The sentence for a MASTER_PORT on which rank 0 cannot listen."""
    return (
        f"MASTER_PORT={port} cannot be used on this machine: another program holds it, or it is no port at "
        "all. Set another one; with --nproc, unset MASTER_PORT and a free one is found."
    )


def whole(environ: Mapping[str, str], name: str) -> int:
    """A variable as a whole number: of at least 1 for a size, else 0. Raises LaunchError."""
    try:
        value = int(environ[name])
    except ValueError:
        value = -1
    if value < (1 if name.endswith("SIZE") else 0):
        raise LaunchError(f"{name}={environ[name]!r}: expected a whole number, as torchrun sets it.")
    return value


def listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]


def _is_are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
