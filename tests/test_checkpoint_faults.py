"""Faults in every stage of a save: the process killed before each call that touches the disk or in the middle
of a write, one of two ranks killed, a full disk, a folder that cannot be written. What was good stays good,
and nobody hangs.

A fault is injected from outside: Python announces every open, rename, mkdir and removal as an audit event,
and the n-th one kills. So the stages are those that there are, not those that somebody listed.
"""

import os
import re
import resource
import signal
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forks import forked, fresh_process, join, kill_at, wait_for
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from ftrain import checkpoint


@pytest.fixture(scope="module")
def in_fresh_process():
    with fresh_process() as run:
        yield run


def state(step: int) -> dict:
    return {"w": torch.arange(4096.0).view(64, 64) + step, "b": torch.full((5,), float(step)), "step": step}


def holds(path: Path) -> int:
    """The step whose state `path` holds, bit for bit; 0 if it holds none."""
    loaded, meta = checkpoint.load(path, {"w": torch.zeros(64, 64), "b": torch.zeros(5), "step": 0})
    want = state(meta["step"])
    same = loaded["step"] == want["step"] and all(torch.equal(loaded[name], want[name]) for name in ("w", "b"))
    return meta["step"] if same else 0


def warm_up(tmp: Path) -> None:
    """Import everything that is imported late, so that no child spends seconds on it."""
    import torch._dynamo  # noqa: F401 - DTensor.from_local imports it

    torch.set_num_threads(1)
    checkpoint.save(tmp / "warm up", state(1), step=1, meta={}, keep=1)


# --- one process ----------------------------------------------------------------------------------


def kill_everywhere(tmp: Path, again: bool) -> list[str]:
    """Kill a save before its 1st, 2nd, ... call to the disk until one lives. Returns what each left."""
    warm_up(tmp)
    found = []
    new = 3 if again else 6  # save another step, or replace the one there is
    for n in range(1, 200):
        root = tmp / f"kill {n}"
        checkpoint.save(root, state(3), step=3, meta={}, keep=1)

        def doomed(root=root, n=n):
            kill_at(n)
            checkpoint.save(root, state(new), step=new, meta={}, keep=1)

        code = wait_for(forked(doomed))
        path, _ = checkpoint.latest(root)
        step = holds(path)
        checkpoint.save(root, state(9), step=9, meta={}, keep=1)  # the next save is not in the way of the ruins
        after = [(step, holds(path)) for step, path in checkpoint.complete(root)]
        leftovers = sorted(entry.name for entry in root.iterdir())
        if after != [(9, 9)] or leftovers != ["step-00000009"]:
            found.append(f"after kill {n}: {after} {leftovers}")
        found.append("survived" if code == 0 else f"{step}")
        if code == 0:
            break
    return found


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step again"])
def test_a_save_killed_at_any_moment_leaves_the_last_good_one(in_fresh_process, tmp_path, again):
    *killed, end = in_fresh_process(kill_everywhere, tmp_path, again)
    assert end == "survived" and len(killed) > 12
    if again:
        assert set(killed) == {"3"}
    else:  # the old one until the new one has its name, then the new one
        assert set(killed) == {"3", "6"} and killed == sorted(killed)


def kill_in_writes(tmp: Path) -> list[int]:
    """The kernel ends the process in the middle of a write, after so many bytes of the file."""
    warm_up(tmp)
    found = []
    for limit in (0, 1, 100, 300, 5000, 16000, 16383, 16384):
        root = tmp / f"limit {limit}"
        checkpoint.save(root, state(3), step=3, meta={}, keep=1)

        def doomed(root=root, limit=limit):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            checkpoint.save(root, state(6), step=6, meta={}, keep=1)

        code = wait_for(forked(doomed))
        assert code == -signal.SIGXFSZ, code
        found.append(holds(checkpoint.latest(root)[0]))
    return found


def test_a_save_killed_in_the_middle_of_a_write_leaves_the_last_good_one(in_fresh_process, tmp_path):
    assert set(in_fresh_process(kill_in_writes, tmp_path)) == {3}


# --- two ranks ------------------------------------------------------------------------------------


def sharded(step: int) -> dict:
    """`state(step)` with the matrix split over the ranks of the default group."""
    whole = state(step)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = whole["w"].chunk(dist.get_world_size())[dist.get_rank()].contiguous()
    return {**whole, "w": DTensor.from_local(part, mesh, [Shard(0)], run_check=False)}


def kill_one_of_two(tmp: Path, victim: int) -> list[tuple[int, int, int]]:
    """Two ranks save; one is killed before its n-th call to the disk. Returns (exit codes, step found)."""
    warm_up(tmp)
    found = []
    for n in range(1, 200):
        root = tmp / f"kill {n}"
        checkpoint.save(root, state(3), step=3, meta={}, keep=1)

        def rank(me, root=root, n=n):
            join(root.with_suffix(".store"), me)
            parts = sharded(6)
            if me == victim:
                kill_at(n)
            checkpoint.save(root, parts, step=6, meta={}, keep=1)

        children = [forked(lambda me=me: rank(me)) for me in range(2)]
        codes = [wait_for(pid) for pid in children]
        found.append((*codes, holds(checkpoint.latest(root)[0])))
        if codes[victim] == 0:
            break
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_any_moment_ends_the_others_and_costs_nothing(in_fresh_process, tmp_path, victim):
    *killed, end = in_fresh_process(kill_one_of_two, tmp_path, victim)
    assert end == (0, 0, 6) and len(killed) >= (12 if victim == 0 else 1)
    for n, (*codes, step) in enumerate(killed, start=1):
        assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 7, (n, codes)
        assert step == (3 if victim == 1 else step) and step in (3, 6), (n, step)


def save_with_a_fault(rank: int, root: Path, fault: str) -> tuple[str, str]:
    """Save with a fault on one rank, then without. Returns the error and what the saves left."""
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    user = os.geteuid()
    if fault == f"disk full for rank {rank}":
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    if fault == "disk full for the manifest" and rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8300, limits[1]))  # the data fits, 9000 bytes of meta do not
    if fault == "folder not writable" and user == 0:
        os.seteuid(65534)  # permissions bind everybody but root
    message = ""
    try:
        checkpoint.save(root, sharded(6), step=6, meta={"recipe": "#" * 9000}, keep=1)
    except checkpoint.CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.seteuid(user)
    dist.barrier()
    root.chmod(0o700)
    left = sorted(entry.name for entry in root.iterdir())
    dist.barrier()
    path = checkpoint.save(root, sharded(9), step=9, meta={}, keep=2)
    return message, f"{left} {path.name} {holds(path)}"


FAULTS = {
    "disk full for rank 0": "rank 0: OSError: .*File too large",
    "disk full for rank 1": "rank 1: OSError: .*File too large",
    "disk full for the manifest": "OSError: .*File too large",
    "folder not writable": "PermissionError: .*step-00000006.tmp",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_on_one_rank_is_told_by_all_and_the_next_save_works(ranks, tmp_path, fault):
    root = tmp_path / "root"
    checkpoint.save(root, state(3), step=3, meta={}, keep=1)
    for folder in (tmp_path, *tmp_path.parents):  # another user must get as far as root; pytest's workers nest deeper
        if folder == Path(tempfile.gettempdir()) or len(folder.parts) < 3:
            break
        folder.chmod(0o711)
    root.chmod(0o555 if fault == "folder not writable" else 0o700)
    (first, after), (second, also_after) = ranks(2, save_with_a_fault, root, fault)
    assert first == second and first.startswith(f"cannot save step 6 in {root}: ")
    assert re.search(FAULTS[fault], first), first
    assert after == also_after == "['step-00000003'] step-00000009 9"


@pytest.mark.parametrize("name", ["root", "root/below"])
def test_a_file_in_the_place_of_the_folder_is_named(tmp_path, name):
    (tmp_path / "root").write_text("a file")
    with pytest.raises(checkpoint.CheckpointError, match=f"cannot save step 1 in .*{name}: .*Error"):
        checkpoint.save(tmp_path / name, state(1), step=1, meta={}, keep=1)


def test_a_failed_background_save_tells_when_waited_for(tmp_path):
    (tmp_path / "root").write_text("a file")
    pending = checkpoint.save_async(tmp_path / "root", state(1), step=1, meta={}, keep=1)
    with pytest.raises(checkpoint.CheckpointError, match="cannot save step 1"):
        pending.wait()
    with pytest.raises(checkpoint.CheckpointError):  # and every time
        pending.wait()
    assert pending.done()
