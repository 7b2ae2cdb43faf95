"""Faults in the middle of a run, on one of two ranks: both end, in time and with the cause, and the last good
checkpoint loads.

Ranks are forks that train the tiny recipe and end with the code that the command would end with.
"""

import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest
from forks import PATIENCE, forked, fresh_process, join, kill_at, wait_for
from runs import contents
from tiny import write_tiny

from ftrain import Run, checkpoint, interrupt, load_recipe
from ftrain.checkpoint import storage
from ftrain.cli import explain
from ftrain.launch import LOST_PEER, World
from ftrain.metrics import read_lines
from ftrain.trainer import train

KILLED = -signal.SIGKILL
OPTIONS = ("parallel.shard=2", "checkpoint.every=2", "validation.every=0", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def in_fresh_process():
    with fresh_process() as run:
        yield run


# --- the ranks --------------------------------------------------------------------------------------


def in_step(step, act):
    """Do something when the batch of `step` (from 1) is read."""
    batch = Run.batch

    def reader(run, at):
        if at + 1 == step:
            act()
        return batch(run, at)

    Run.batch = reader


def in_write(step, act):
    """Do something when this rank writes its part of the checkpoint of `step`."""
    write = storage.write_chunks

    def writer(path, chunks):
        if f"step-{step:08d}" in str(path):
            act()
        return write(path, chunks)

    storage.write_chunks = writer


def fail(error):
    raise error


def kill(signum):
    os.kill(os.getpid(), signum)


def two_signals(signum, apart):
    """One in step 3, one in the save after it: as if they came long apart, or as soon as they do."""
    if apart:
        interrupt.SAME_SECONDS = 0.0
    in_step(3, lambda: kill(signum))
    in_write(3, lambda: kill(signum))


def disk_is_full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def put_a_file_in_the_place_of(folder):
    folder.rename(folder.with_name("moved"))
    folder.write_text("a file")


FAULTS = {  # each changes the rank on which it happens
    "kill in step 4": lambda out: in_step(4, lambda: kill(signal.SIGKILL)),
    "kill in a write": lambda out: in_write(4, lambda: kill(signal.SIGKILL)),
    "reader": lambda out: in_step(4, lambda: fail(OSError("the disk of the reader is gone"))),
    "disk full": lambda out: in_write(4, disk_is_full),
    "folder gone": lambda out: in_write(4, lambda: put_a_file_in_the_place_of(out / "checkpoints")),
    "SIGTERM": lambda out: in_step(3, lambda: kill(signal.SIGTERM)),
    "SIGINT": lambda out: in_step(3, lambda: kill(signal.SIGINT)),
    "two SIGTERM": lambda out: two_signals(signal.SIGTERM, apart=True),
    "two SIGINT": lambda out: two_signals(signal.SIGINT, apart=True),
    "SIGTERM that is passed on": lambda out: two_signals(signal.SIGTERM, apart=False),
    "slow save": lambda out: in_write(2, lambda: time.sleep(1)),
    "slow save, then reader": lambda out: (
        in_write(2, lambda: time.sleep(1)),
        in_step(3, lambda: fail(OSError("the disk of the reader is gone"))),
    ),
    "kill in a slow save": lambda out: in_write(2, lambda: (time.sleep(0.5), kill(signal.SIGKILL))),
    "none": lambda out: None,
}


def rank_main(rank: int, recipe, out: Path, prepare) -> None:
    """What a rank process does: train, and end as the command does."""
    join(out.with_suffix(".store"), rank)
    prepare()
    start = time.monotonic()
    try:
        train(recipe, out=out, quiet=True, world=World(rank, 2))
        code, said = 0, ""
    except BaseException as error:
        code, said, _ = explain(error, 0)
    out.with_suffix(f".{rank}").write_text(f"{time.monotonic() - start}\n{said}")
    os._exit(code)


def end(code: int, what: str) -> tuple[int, str, float]:
    seconds, _, said = what.partition("\n")
    return code, said, float(seconds or 0)


def run_two(recipe, out: Path, prepare: dict) -> list[tuple[int, str, float]]:
    """Two ranks, `prepare[rank]()` before each. Returns (exit code, last words, seconds) of each."""
    children = [forked(lambda r=r: rank_main(r, recipe, out, prepare.get(r, lambda: None))) for r in range(2)]
    codes = [wait_for(pid) for pid in children]
    words = [out.with_suffix(f".{rank}") for rank in range(2)]
    return [end(code, file.read_text() if file.exists() else "") for code, file in zip(codes, words, strict=True)]


def with_fault(tmp: Path, faults: dict, *overrides: str):
    """A run with these faults (rank -> name). Returns what `run_two` does, and the steps that load whole."""
    import torch._dynamo  # noqa: F401 - now, so that no child spends seconds on it

    recipe = load_recipe(write_tiny(tmp), (*OPTIONS, *overrides))
    out = tmp / "out"
    return run_two(recipe, out, {rank: lambda n=name: FAULTS[n](out) for rank, name in faults.items()})


def kept(out: Path) -> list[int]:
    """The steps whose checkpoints load, every one of them with finite values."""
    steps = []
    for step, path in checkpoint.complete(out / "checkpoints"):
        assert contents(path)["step"] == step
        steps.append(step)
    return steps


LOST = r"the run failed (in|after) step \d+: another rank was lost"
SAVE = {"in step": ["checkpoint.async_save=false"], "beside": ["checkpoint.async_save=true"]}


# --- a rank is lost ---------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("save", SAVE)
@pytest.mark.parametrize("fault", ["kill in step 4", "kill in a write", "kill in a slow save"])
def test_a_killed_rank_ends_the_other(in_fresh_process, tmp_path, fault, save, victim):
    ends = in_fresh_process(with_fault, tmp_path, {victim: fault}, *SAVE[save])
    code, said, seconds = ends[1 - victim]
    assert ends[victim][0] == KILLED
    assert code == LOST_PEER and re.fullmatch(LOST, said) and seconds < 30
    if (fault, save) == (
        "kill in step 4",
        "beside",
    ):  # the save of step 2 may or may not have been whole by then
        assert kept(tmp_path / "out") in ([], [2])
    else:
        assert kept(tmp_path / "out") == ([] if fault == "kill in a slow save" else [2])


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("save", SAVE)
def test_an_error_on_one_rank_is_that_ranks_and_ends_the_other(in_fresh_process, tmp_path, save, victim):
    ends = in_fresh_process(with_fault, tmp_path, {victim: "reader"}, *SAVE[save])
    assert ends[victim][:2] == (1, "the run failed in step 4: OSError: the disk of the reader is gone")
    assert ends[1 - victim][0] == LOST_PEER and re.fullmatch(LOST, ends[1 - victim][1])
    assert kept(tmp_path / "out") == [2]


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_lets_a_save_that_goes_on_become_whole_and_is_told_itself(in_fresh_process, tmp_path, victim):
    faults = {victim: "slow save, then reader", 1 - victim: "slow save"}
    ends = in_fresh_process(with_fault, tmp_path, faults, *SAVE["beside"])
    assert ends[victim][:2] == (1, "the run failed in step 3: OSError: the disk of the reader is gone")
    assert ends[1 - victim][0] == LOST_PEER and max(seconds for _, _, seconds in ends) < 30
    assert kept(tmp_path / "out") == [2]


# --- the disk ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", SAVE)
@pytest.mark.parametrize(("fault", "said"), [("disk full", "File too large"), ("folder gone", "Error: ")])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_fails_is_the_cause_on_both_ranks(in_fresh_process, tmp_path, fault, said, save, victim):
    ends = in_fresh_process(with_fault, tmp_path, {victim: fault}, *SAVE[save])
    first, second = ends
    assert first[:2] == second[:2] and first[0] == 1 and max(first[2], second[2]) < 30
    # Beside training, the error is raised where the next save begins.
    after = 4 if save == "in step" else 6
    assert re.match(f"the run failed after step {after}: cannot save step 4 in .*{said}", first[1]), first
    out = tmp_path / "out"
    if fault == "folder gone":
        (out / "checkpoints").unlink()
        (out / "moved").rename(out / "checkpoints")
    assert kept(out) == [2]


# --- signals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("save", SAVE)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_any_rank_saves_once_and_stops_both(in_fresh_process, tmp_path, name, save, rank):
    ends = in_fresh_process(with_fault, tmp_path, {rank: name}, *SAVE[save])
    code = 128 + getattr(signal, name)
    said = "stopped after step 3, as asked; the checkpoint is saved."
    assert [end[:2] for end in ends] == [(code, said)] * 2 and max(end[2] for end in ends) < 30
    assert kept(tmp_path / "out") == [2, 3]
    assert read_lines(tmp_path / "out" / "metrics.jsonl")[-1]["step"] == 3


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_at_once_and_costs_the_new_checkpoint_at_most(in_fresh_process, tmp_path, name, rank):
    ends = in_fresh_process(with_fault, tmp_path, {rank: f"two {name}"})
    assert ends[rank][0] == (-signal.SIGTERM if name == "SIGTERM" else 128 + signal.SIGINT)
    assert ends[1 - rank][0] == LOST_PEER and ends[1 - rank][2] < 30
    assert kept(tmp_path / "out") == [2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_that_comes_twice_at_once_is_one(in_fresh_process, tmp_path, rank):
    """As it does where all processes of a job are signalled, and one of them passes it on."""
    ends = in_fresh_process(with_fault, tmp_path, {rank: "SIGTERM that is passed on"})
    assert [code for code, *_ in ends] == [128 + signal.SIGTERM] * 2
    assert kept(tmp_path / "out") == [2, 3]


# --- at any moment ----------------------------------------------------------------------------------


def kill_at_moments(tmp: Path, victim: int, save: str, stride: int) -> list:
    """Runs of which a rank is killed before the n-th call to the disk under --out, for every stride-th n."""
    import torch._dynamo  # noqa: F401

    recipe = load_recipe(write_tiny(tmp), (*OPTIONS, *SAVE[save], "checkpoint.keep=1"))
    found = []
    for n in range(1, 400, stride):
        out = tmp / f"killed at {n}"
        ends = run_two(recipe, out, {victim: lambda n=n, out=out: kill_at(n, below=out)})
        found.append((n, [code for code, _, _ in ends], ends[1 - victim][1:], kept(out)))
        if ends[victim][0] == 0:
            return found
    raise AssertionError("it never lived")


@pytest.mark.slow
@pytest.mark.parametrize("save", SAVE)
@pytest.mark.parametrize(("victim", "stride"), [(0, 7), (1, 1)])
def test_a_rank_killed_at_any_moment_costs_what_was_not_yet_saved(in_fresh_process, tmp_path, victim, save, stride):
    *killed, last = in_fresh_process(kill_at_moments, tmp_path, victim, save, stride)
    assert last[1] == [0, 0] and last[3] == [6]
    newest = [steps[-1] if steps else 0 for _, _, _, steps in killed]
    assert newest == sorted(newest) and len(killed) >= 3
    for n, codes, (said, seconds), _ in killed:
        assert codes[victim] == KILLED and seconds < PATIENCE / 2, n
        # Rank 1 may have done all of its part when rank 0 dies in its last words.
        assert codes[1 - victim] in (LOST_PEER, 0), (n, codes, said)
