"""Several ranks on one machine, without torchrun: start them, wait, and let nobody hang when one dies."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from ftrain.launch import LOST_PEER, LaunchError, listed, port_taken, whole

GRACE_SECONDS = 15.0  # for the other ranks to end by themselves once one has died
STOP_SECONDS = 30.0  # to finish the step and save, after an interrupt
TICK_SECONDS = 0.05


def spawn(
    nproc: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    grace: float = GRACE_SECONDS,
    stop: float = STOP_SECONDS,
) -> int:
    """Run `command` as `nproc` ranks of this machine and wait for them. Returns the exit code to leave with.

    Their output goes where ours goes. When one rank dies, the others get `grace` seconds to end by themselves
    and are then killed; one sentence on stderr says which died first, and how. SIGINT and SIGTERM are passed
    on as SIGTERM: the ranks get `stop` seconds to save, and none after a second signal. Raises LaunchError
    when MASTER_PORT is taken.
    """
    with _port(environ) as port, _signals() as caught:
        ranks: list[subprocess.Popen] = []
        try:
            for rank in range(nproc):
                ranks.append(_start(command, rank_environ(rank, nproc, port, environ)))
            first, killed = _watch(ranks, caught, grace, stop)
        finally:
            for process in ranks:
                _kill(process)
    codes = [process.returncode for process in ranks]
    if caught:
        name = signal.Signals(caught[0]).name
        print(f"ftrain: stopped by {name}.{_were_killed(killed, stop)}", file=sys.stderr)
        return 128 + caught[0]
    code, sentence = verdict(codes, first)
    if sentence:
        print(f"ftrain: {sentence}{_were_killed(killed, grace)}", file=sys.stderr)
    return code


def verdict(codes: Sequence[int], first: Sequence[int]) -> tuple[int, str]:
    """(exit code, sentence) for the return codes of the ranks, of which those in `first` failed first.

    Negative codes are signals, as in subprocess. A rank that ended since it lost a peer is not the cause
    where there is another; a mistake in the recipe (code 2) has been explained by rank 0 and needs no sentence.
    """
    if not first:
        return 0, ""
    failed = [*first, *(rank for rank, code in enumerate(codes) if code > 0)]
    rank = next((rank for rank in failed if codes[rank] != LOST_PEER), first[0])
    code = codes[rank]
    if code == 2 or code > 128:
        return code, ""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return (code if code > 0 and code != LOST_PEER else 1), f"rank {rank} of {len(codes)} {how}."


def rank_environ(rank: int, nproc: int, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of one local rank: torchrun's variables and, unless set, a share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // nproc))}
    if sys.platform == "linux":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would look up this machine's name, which may lead nowhere
    return {
        **defaults,
        **environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen:
    """In a session of its own: Ctrl-C reaches only us, and killing its group kills its workers too."""
    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_end_with_launcher if sys.platform == "linux" else None,
    )


def _end_with_launcher() -> None:
    """In a new rank: ask the kernel for SIGTERM when the launcher dies, however (PR_SET_PDEATHSIG is 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _watch(
    ranks: Sequence[subprocess.Popen], caught: Sequence[int], grace: float, stop: float
) -> tuple[list[int], list[int]]:
    """Wait until all ranks have ended. Returns (those that failed first, those that had to be killed)."""
    first: list[int] = []
    killed: list[int] = []
    passed_on, deadline = 0, float("inf")
    while running := [i for i, rank in enumerate(ranks) if rank.poll() is None]:
        failed = [i for i, rank in enumerate(ranks) if rank.returncode not in (None, 0)]
        now = time.monotonic()
        if failed and not first:
            first = failed
            # After a mistake in the recipe, which all ranks make, the others only wait.
            deadline = min(deadline, now + (0 if any(ranks[i].returncode == 2 for i in failed) else grace))
        if len(caught) > passed_on:
            deadline = now if passed_on else now + stop
            passed_on = len(caught)
            for i in running:
                ranks[i].terminate()
        if now >= deadline and not killed:
            killed = running
            for i in running:
                _kill(ranks[i])
        time.sleep(TICK_SECONDS)
    return first or [i for i, rank in enumerate(ranks) if rank.returncode], killed


def _kill(rank: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()


def _were_killed(ranks: Sequence[int], seconds: float) -> str:
    if not ranks:
        return ""
    who = ("Rank " if len(ranks) == 1 else "Ranks ") + listed([str(rank) for rank in ranks])
    return f" {who} did not end within {seconds:g} s and had to be killed."


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of ending. Outside the main thread it stays empty."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {s: signal.signal(s, lambda signum, _: caught.append(signum)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _port(environ: Mapping[str, str]) -> Iterator[int]:
    """A port for rank 0 to listen on, held while the ranks run so that no other start is given it.

    We bind and do not listen; with SO_REUSEADDR on both sides rank 0 may still bind and listen (on Linux).
    """
    wanted = whole(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else 0
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("127.0.0.1", wanted))
        except (OSError, OverflowError) as error:
            raise LaunchError(port_taken(wanted)) from error
        yield held.getsockname()[1]
