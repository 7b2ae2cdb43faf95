"""Processes to be killed: forks of a fresh one, so that none costs an import of torch."""

import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

DISK_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}
PATIENCE = 60.0  # seconds in which every rank must have ended


def kill_at(n: int, below: Path | None = None) -> None:
    """Kill this process, as kill -9 does, just before its n-th call that touches the disk (there)."""
    count = 0

    def listen(event: str, args: tuple) -> None:
        nonlocal count
        if event in DISK_EVENTS and (below is None or str(args[0]).startswith(str(below))):
            count += 1
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(listen)


def forked(fn) -> int:
    """Run `fn` in a fork of this process. Returns the child's pid; exit code 0, or 7 if `fn` raised."""
    if pid := os.fork():
        return pid
    try:
        fn()
        os._exit(0)
    except BaseException:
        os._exit(7)


def wait_for(pid: int) -> int:
    """The exit code of a child, negative for a signal. A child that hangs is killed, and an error."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"process {pid} hung for {PATIENCE} s")


@contextmanager
def fresh_process() -> Iterator[Callable]:
    """Yields `run(fn, *args)`: run in a process that may fork (no threads, no process group)."""
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        yield lambda fn, *args: pool.submit(fn, *args).result(timeout=240)


def join(store: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
