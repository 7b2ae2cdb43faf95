"""Shared fixtures: `ranks` runs a function on several gloo ranks; `tiny` is a recipe whose steps take milliseconds."""

import os
import socket
import traceback

# Before torch starts: one thread a process, so that ranks and parallel test runs do not fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from tiny import write_tiny  # noqa: E402

from ftrain import load_recipe  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

TIMEOUT = 240  # seconds that one call of `ranks` may take


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _worker(rank: int, world: int, port: int, pipe):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while (task := pipe.recv()) is not None:
        fn, args = task
        try:
            pipe.send((True, fn(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """Gloo ranks that stay between tests: starting a process and importing torch takes seconds."""

    def __init__(self, n: int):
        context = mp.get_context("spawn")
        port = free_port()
        pipes = [context.Pipe() for _ in range(n)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_worker, args=(rank, n, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def run(self, fn, args) -> list:
        for pipe in self.pipes:
            pipe.send((fn, args))
        results, failures = [], []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(5 if failures else TIMEOUT):  # a failed rank's peers may wait for it for ever
                failures.append(f"rank {rank} did not answer")
                continue
            try:
                fine, value = pipe.recv()
            except EOFError:
                fine, value = False, "the process ended; its error is in the test's output"
            (results if fine else failures).append(value if fine else f"rank {rank}:\n{value}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def close(self):
        for process in self.processes:
            process.kill()


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n, fn, *args)`: the list of what module-level `fn(rank, *args)` returns on n gloo ranks.

    Arguments and results travel by pickle; return numpy arrays rather than tensors.
    """
    pools: dict[int, Pool] = {}

    def run(n: int, fn, *args) -> list:
        pool = pools.get(n) or pools.setdefault(n, Pool(n))
        try:
            return pool.run(fn, args)
        except AssertionError:
            del pools[n]
            raise

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture
def tiny(tmp_path):
    """`tiny("table.key=value", ...)`: the tiny recipe with overrides."""
    path = write_tiny(tmp_path)
    return lambda *overrides: load_recipe(path, overrides)
