"""Who a process is, from its environment, and how ranks find each other."""

import os
import socket
import subprocess
import sys
import time

import pytest

from ftrain.launch import LaunchError, World, check_world, is_lost_peer, world_from_env
from ftrain.recipe import Parallel

FULL = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


def test_a_plain_start_is_one_rank():
    assert world_from_env({"PATH": "/bin"}) == World(0, 1, 0)
    assert world_from_env({"MASTER_ADDR": "host", "MASTER_PORT": "29500"}) == World()


def test_torchruns_variables():
    assert world_from_env(FULL) == World(3, 8, 1, "host:29500", local_size=2)
    assert world_from_env({**FULL, "LOCAL_WORLD_SIZE": ""}).local_size == 1  # not known


@pytest.mark.parametrize("present", [["WORLD_SIZE"], ["RANK", "WORLD_SIZE"], ["LOCAL_RANK", "MASTER_PORT"]])
def test_missing_variables_are_listed(present):
    with pytest.raises(LaunchError) as error:
        world_from_env({name: FULL[name] for name in present})
    said, _, rest = str(error.value).partition(" not: ")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert name in said.split(" set but ")[name not in present].replace(",", "").split()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": "8"}, "RANK=8 with WORLD_SIZE=8: expected RANK between 0 and 7"),
        ({"RANK": "x"}, "RANK='x'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT='-1'"),
    ],
)
def test_variables_that_cannot_be(change, said):
    with pytest.raises(LaunchError, match=said.replace("(", r"\(")):
        world_from_env({**FULL, **change})


def parallel(shard=1, tensor=1):
    return Parallel(shard=shard, tensor=tensor)


def test_a_plain_start_that_needs_more_says_what_to_type():
    said = check_world(parallel(shard=2), World(), "train debug")
    assert "needs 2 processes, and a plain start has 1" in said
    assert "ftrain train debug --nproc 2" in said
    assert "torchrun --nproc-per-node 2 -m ftrain.cli train debug" in said
    assert "a multiple of 3 processes" in check_world(parallel(shard=-1, tensor=3), World(), "train debug")


def test_nothing_to_say_where_the_world_may_fit():
    assert check_world(parallel(), World(), "") is None
    assert check_world(parallel(shard=-1), World(), "") is None
    assert check_world(parallel(shard=2), World(0, 2), "") is None


def test_a_lost_peer_is_told_from_a_mistake():
    import torch.distributed as dist

    pair, nccl = "[../gloo/transport/tcp/pair.cc:547] ", "NCCL error in: ProcessGroupNCCL.cpp:3763, "
    lost = [
        RuntimeError(pair + "Connection closed by peer [127.0.0.1]:3141"),
        RuntimeError(pair + "Read error [10.0.0.2]:25266: Connection reset by peer"),
        RuntimeError(pair + "writev [10.0.0.2]:25266: Broken pipe"),
        RuntimeError(pair + "Application timeout caused pair closure"),
        RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation"),
        dist.DistBackendError(nccl + "remote process exited or there was a network error, NCCL version 2.28.8"),
        dist.DistBackendError(nccl + "internal error\nLast error:\nNet : Connection closed by remote peer n1<50260>"),
        dist.DistBackendError("NCCL communicator was aborted on rank 2."),
        dist.DistBackendError("[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=10)"),
        dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
        dist.DistStoreError("wait timeout after 600000ms, keys: /default_pg/0//cuda//0"),
    ]
    assert [error for error in lost if not is_lost_peer(error)] == []
    mistakes = [
        RuntimeError("shapes (2, 3) and (4, 5) do not match"),
        ValueError("gloo: connection closed by peer"),
        RuntimeError("the socket wrench was aborted: connection refused"),
        RuntimeError("[../gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: socket0"),
        dist.DistBackendError(nccl + "invalid usage\nLast error:\nBootstrap : no socket interface found"),
        dist.DistBackendError(nccl + "unhandled cuda error, the kernel was aborted"),
    ]
    assert [error for error in mistakes if is_lost_peer(error)] == []


JOIN = """
import os, torch
from ftrain.launch import LaunchError, init_process_group, world_from_env
try:
    init_process_group(world_from_env(os.environ), torch.device("cpu"), rendezvous=3)
except LaunchError as error:
    print(error, flush=True)
    os._exit(2)
"""


def test_a_port_that_another_program_holds_is_named_by_every_rank():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port, start = other.getsockname()[1], time.monotonic()
        ranks = []
        for rank in ("0", "1"):
            env = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            ranks.append(subprocess.Popen([sys.executable, "-c", JOIN], env=env, stdout=subprocess.PIPE))
        said = [rank.communicate(timeout=60)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert f"MASTER_PORT={port} cannot be used" in said[0]
    assert str(port) in said[1] and "another program" in said[1]
    assert time.monotonic() - start < 60
