"""The command: its exit codes, what it prints, and that no rank is left hanging."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from tiny import write_tiny

from ftrain.checkpoint import complete
from ftrain.cli import main
from ftrain.metrics import read_lines

COMMAND = [sys.executable, "-m", "ftrain.cli"]
ENV = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}


@pytest.fixture
def tiny(tmp_path):
    return write_tiny(tmp_path)


def in_process(*words: str, env: dict | None = None):
    return CliRunner(env=env).invoke(main, [*words])


def ftrain(*words: str, env: dict | None = None, timeout: float = 90) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMAND, *words], env={**ENV, **(env or {})}, capture_output=True, text=True, timeout=timeout
    )


def test_help_needs_no_torch():
    script = "import sys; from ftrain.cli import main; main(['train', '--help'], standalone_mode=False)"
    check = "; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'optree')))"
    start = time.monotonic()
    assert subprocess.run([sys.executable, "-c", script + check], stdout=subprocess.DEVNULL).returncode == 0
    assert time.monotonic() - start < 2


def test_train_and_validate(tiny, tmp_path):
    out = str(tmp_path / "out")
    trained = in_process("train", tiny, "--out", out, "--set", "train.steps=3")
    assert trained.exit_code == 0, trained.output
    result = in_process("validate", tiny, "--checkpoint", out, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert values["loss"] == read_lines(tmp_path / "out" / "metrics.jsonl")[-1]["validation_loss"]
    assert values["step"] == 3 and values["tokens"] == 80 and values["perplexity"] > 1
    assert f"held-out loss {values['loss']:.4f}" in in_process("validate", tiny, "--checkpoint", out).output
    assert "no --checkpoint was given" in in_process("validate", tiny).output


@pytest.mark.parametrize("command", ["train", "validate"])
def test_mistakes_are_said_together_without_a_traceback(tiny, command):
    result = in_process(command, tiny, "--set", "train.stepz=5", "--set", "optimizer.lr=-1")
    assert result.exit_code == 2
    assert "train.stepz" in result.output and "optimizer.lr" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "no-such-recipe"], "no-such-recipe"),
        (["train", "RECIPE", "--set", "data.source=/nowhere/*.txt"], "/nowhere/*.txt"),
        (["validate", "RECIPE", "--checkpoint", "/nowhere"], "--checkpoint /nowhere"),
        (["train", "RECIPE", "--out", "/proc/nowhere"], "--out /proc/nowhere"),
        (["train", "RECIPE", "--nproc", "0"], "--nproc"),
        (["train"], "RECIPE"),
    ],
)
def test_what_the_user_can_mend_exits_with_2(tiny, words, said):
    result = in_process(*(tiny if word == "RECIPE" else word for word in words))
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_plain_start_of_a_recipe_for_two(tiny):
    result = in_process("train", tiny, "--set", "parallel.shard=2")
    assert result.exit_code == 2
    assert f"ftrain train {tiny} --set parallel.shard=2 --nproc 2" in result.output


def test_an_environment_that_says_half(tiny):
    result = in_process("train", tiny, env={"WORLD_SIZE": "2"})
    assert result.exit_code == 2
    assert "RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are not" in result.output


def test_nproc_and_torchrun_exclude_each_other(tiny):
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    result = ftrain("train", tiny, "--nproc", "4", env=env)
    assert result.returncode == 2
    assert "use --nproc or torchrun, not both" in result.stderr


def test_a_network_interface_that_is_not_there(tiny):
    result = ftrain("train", tiny, "--nproc", "2", env={"GLOO_SOCKET_IFNAME": "none0"})
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "GLOO_SOCKET_IFNAME=none0: this machine has no network interface of that name" in result.stderr


def test_two_ranks_give_the_numbers_of_one(tiny, tmp_path):
    two = ftrain("train", tiny, "--nproc", "2", "--out", str(tmp_path / "two"), "--set", "train.steps=3")
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("3/3  loss") == 1
    in_process("train", tiny, "--out", str(tmp_path / "one"), "--set", "train.steps=3")
    one, two = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-5)


@pytest.mark.parametrize("sets", [["parallel.shard=-1", "parallel.tensor=3"], ["parallel.shard=8"]])
def test_degrees_that_do_not_make_the_world_are_said_once(tiny, sets):
    words = [word for item in sets for word in ("--set", item)]
    result = ftrain("train", tiny, "--nproc", "2", *words)
    assert result.returncode == 2
    assert result.stderr.count("parallel: replicate") == 1
    assert "world size of 2" in result.stderr and "Traceback" not in result.stderr


def test_two_runs_at_once(tiny):
    words = [*COMMAND, "train", tiny, "--nproc", "2", "--quiet", "--set", "train.steps=2"]
    runs = [subprocess.Popen(words, env=ENV) for _ in range(2)]
    assert [run.wait(timeout=300) for run in runs] == [0, 0]


FOREVER = ["--set", "train.steps=100000", "--set", "checkpoint.every=0", "--set", "validation.every=0"]


def start_and_reach(step: int, tiny: str, out, *words: str) -> subprocess.Popen:
    """A run that has reached `step`."""
    run = subprocess.Popen(
        [*COMMAND, "train", tiny, "--out", str(out), *FOREVER, *words],
        env=ENV,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(read_lines(out / "metrics.jsonl")) < step:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.05)
    return run


def pid_of_rank(rank: int, launcher: subprocess.Popen) -> int:
    children = open(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read().split()
    for pid in children:
        if f"\0RANK={rank}\0" in open(f"/proc/{pid}/environ").read():
            return int(pid)
    raise AssertionError(children)


linux = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")


@linux
def test_a_killed_rank_ends_the_run_in_time(tiny, tmp_path):
    run = start_and_reach(3, tiny, tmp_path / "out", "--nproc", "2")
    os.kill(pid_of_rank(1, run), signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert re.search(r"rank 0: the run failed (in|after) step \d+: another rank was lost", err)
    assert "rank 1 of 2 was killed by SIGKILL" in err
    assert complete(tmp_path / "out" / "checkpoints") == []


@linux
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tiny, tmp_path):
    run = start_and_reach(3, tiny, tmp_path / "out", "--nproc", "2")
    os.kill(pid_of_rank(1, run), signal.SIGTERM)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 143, err
    [(step, _)] = complete(tmp_path / "out" / "checkpoints")
    assert read_lines(tmp_path / "out" / "metrics.jsonl")[-1]["step"] == step
    assert f"stopped after step {step}, as asked; the checkpoint is saved" in err


def test_ctrl_c_saves(tiny, tmp_path):
    run = start_and_reach(3, tiny, tmp_path / "out")
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert len(complete(tmp_path / "out" / "checkpoints")) == 1


BROKEN_READER = """
import os, sys
from ftrain.run import Run
from ftrain.cli import main
batch = Run.batch
def reader(run, step):
    if step == 3 and run.world.rank == 1:
        raise OSError("the disk of rank 1 is gone")
    return batch(run, step)
Run.batch = reader
main(sys.argv[1:])
"""


def test_an_error_on_one_rank_is_shown_and_ends_all(tiny, tmp_path, capfd):
    from ftrain.spawn import spawn

    words = ["train", tiny, "--out", str(tmp_path / "out"), *FOREVER]
    assert spawn(2, [sys.executable, "-c", BROKEN_READER, *words], ENV) == 1
    err = capfd.readouterr().err
    assert "rank 1: the run failed in step 4: OSError: the disk of rank 1 is gone" in err
    assert "rank 0: the run failed in step 4: another rank was lost" in err
    assert "rank 1 of 2 ended with exit code 1." in err
    assert complete(tmp_path / "out" / "checkpoints") == []
