"""torchrun starts the ranks again after one is lost, and the run goes on from its last checkpoint by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import contents, on, records, run_train
from tiny import write_tiny

import ftrain
from ftrain.checkpoint import complete

# A command whose data fails once: the first rank that reads step 5 while the flag is missing sets it and dies.
COMMAND = """
import os, signal, sys
from pathlib import Path
from ftrain.cli import main
from ftrain.run import Run

batch, (flag, how) = Run.batch, sys.argv[1:3]

def reader(run, step):
    if step == 4 and run.world.rank == 1 and not Path(flag).exists():
        Path(flag).touch()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the disk is gone")
    return batch(run, step)

Run.batch = reader
main(sys.argv[3:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_restart_goes_on_from_the_last_checkpoint(ranks, tmp_path, how):
    path, script, flag = write_tiny(tmp_path), tmp_path / "command.py", tmp_path / "flag"
    script.write_text(COMMAND)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    torchrun += ["--nproc-per-node", "2", str(script), str(flag), how]
    out = tmp_path / "out"
    words = ["train", path, "--out", str(out), "--set", "parallel.shard=2"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    env["PYTHONPATH"] = str(Path(ftrain.__file__).parent.parent)
    done = subprocess.run([*torchrun, *words], env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert flag.exists()
    assert "resumed from" in done.stdout and "step-00000003, after step 3" in done.stdout
    assert "rank 0: the run failed in step 5: another rank was lost" in done.stderr
    assert how == "killed" or "rank 1: the run failed in step 5: OSError: the disk is gone" in done.stderr
    assert [step for step, _ in complete(out / "checkpoints")] == [3, 6]
    on(ranks, "shard 2", run_train, path, tmp_path / "straight")
    names = ("straight", "out")
    a, b = (contents(tmp_path / name / "checkpoints" / "step-00000006") for name in names)
    assert a == b
    lines = [records(tmp_path / name) for name in names]
    assert lines[0] == lines[1]
