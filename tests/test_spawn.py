"""Local ranks: all end when one does, in time, with the cause on stderr."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from ftrain.launch import LOST_PEER, LaunchError
from ftrain.spawn import rank_environ, spawn, verdict


def ranks(code: str, n: int = 2, environ=os.environ) -> int:
    return spawn(n, [sys.executable, "-c", f"import os, sys, time; rank = int(os.environ['RANK']); {code}"], environ)


def test_all_well(capfd):
    assert ranks("print(os.environ['WORLD_SIZE'], os.environ['MASTER_ADDR'])") == 0
    out, err = capfd.readouterr()
    assert out.split() == ["2", "127.0.0.1"] * 2
    assert err == ""


def test_rank_0_can_listen_on_the_port_that_is_held_for_it():
    listen = "import socket; s = socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT'])))"
    assert ranks(listen, n=1) == 0


def test_a_rank_that_dies_takes_the_others_along(capfd):
    start = time.monotonic()
    command = [
        sys.executable,
        "-c",
        "import os, time; os.environ['RANK'] == '1' and os.abort(); time.sleep(99)",
    ]
    assert spawn(3, command, os.environ, grace=0.5) == 1
    assert time.monotonic() - start < 20
    err = capfd.readouterr().err
    assert "rank 1 of 3 was killed by SIGABRT. Ranks 0 and 2 did not end within 0.5 s" in err


def test_a_mistake_in_the_recipe_needs_no_second_sentence(capfd):
    start = time.monotonic()
    assert ranks("rank or sys.exit(2); time.sleep(99)") == 2
    assert time.monotonic() - start < 10
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("codes", "first", "code", "said"),
    [
        ([0, 0], [], 0, ""),
        ([2, -9], [0], 2, ""),
        ([LOST_PEER, -9], [1], 1, "rank 1 of 2 was killed by SIGKILL."),
        ([LOST_PEER, 1], [0], 1, "rank 1 of 2 ended with exit code 1."),
        ([LOST_PEER, -9], [0], 1, "rank 0 of 2 ended with exit code 3."),
        ([143, 143], [1], 143, ""),
        ([0, 5, LOST_PEER], [1, 2], 5, "rank 1 of 3 ended with exit code 5."),
    ],
)
def test_the_verdict_names_the_cause(codes, first, code, said):
    assert verdict(codes, first) == (code, said)


def test_threads_are_shared_unless_they_are_set():
    assert int(rank_environ(0, 10**6, 1, {})["OMP_NUM_THREADS"]) == 1
    assert rank_environ(0, 2, 1, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_a_port_that_is_held_is_named_at_once():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(LaunchError, match=f"MASTER_PORT={port} cannot be used"):
            ranks("pass", environ={**os.environ, "MASTER_PORT": port})


LAUNCHER = """
import os, sys
from ftrain.spawn import spawn
sys.exit(spawn(2, [sys.executable, "-c", sys.argv[1]], os.environ, stop=20))
"""
RANK = "import os, signal, sys, time; signal.signal(signal.SIGTERM, {}); os.write(1, b'up\\n'); time.sleep(60)"
POLITE, DEAF = RANK.format("lambda *_: sys.exit(143)"), RANK.format("signal.SIG_IGN")


def launcher(code: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    return process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks(signum):
    process = launcher(POLITE)
    process.send_signal(signum)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signum
    assert err == f"ftrain: stopped by {signum.name}.\n"


def test_a_second_signal_does_not_wait():
    process = launcher(DEAF)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=15)
    assert process.returncode == 130
    assert "Ranks 0 and 1 did not end" in err


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_ranks_end_with_a_launcher_that_was_killed():
    process = launcher(POLITE)
    process.kill()
    process.communicate(timeout=20)  # ends only when every rank has closed its end of the pipe
