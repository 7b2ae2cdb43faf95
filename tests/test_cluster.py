"""docs/cluster.md: its lines run, on two torchruns of one machine; its script and its manifest say what can be run."""

import os
import re
import shlex
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_tiny

from ftrain.checkpoint import complete
from ftrain.cli import main
from ftrain.metrics import read_lines

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "cluster.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def block(language: str, having: str) -> str:
    [found] = [text for kind, text in BLOCKS if kind == language and having in text]
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {key: value for key, value in os.environ.items() if key not in UNSET}
    if sys.platform == "linux":
        inherited["GLOO_SOCKET_IFNAME"] = "lo"  # this machine's name may lead nowhere
    return inherited | {"PYTHONPATH": path, **more}


def on_two(command: list[str], folder: Path, **more: str) -> list[subprocess.CompletedProcess]:
    """The same command twice at once, as on two machines."""
    started = [
        subprocess.Popen(
            command, cwd=folder, env=environment(**more), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        said = [process.communicate(timeout=150) for process in started]
    finally:
        for process in started:
            process.kill()
    return [subprocess.CompletedProcess(command, p.returncode, *texts) for p, texts in zip(started, said, strict=True)]


@pytest.mark.slow
def test_the_line_for_two_machines_runs(tmp_path):
    words = shlex.split(block("sh", "localhost:"))
    assert words[0] == "torchrun" and words.count("localhost:29400") == 1
    words[words.index("localhost:29400")] = f"localhost:{free_port()}"
    done = on_two([*TORCHRUN, *words[1:]], tmp_path)
    assert [process.returncode for process in done] == [0, 0], [process.stderr for process in done]
    shown = [process.stdout for process in done]
    assert sorted("4 ranks on cpu" in text for text in shown) == [False, True]  # rank 0 is on one of them
    out = tmp_path / "runs" / "two-machines"
    assert [line["step"] for line in read_lines(out / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [step for step, _ in complete(out / "checkpoints")] == [4]


def test_the_variables_of_the_operator_do_as_the_options(tmp_path):
    """What Kubeflow's training operator sets in every pod."""
    variables = {
        "PET_NNODES": "2:2",
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"localhost:{free_port()}",
        "PET_RDZV_ID": "llama3-8b",
        "PET_MAX_RESTARTS": "3",
    }
    command = [word.removeprefix("- ") for word in re.findall(r"^ +(- .*)$", block("yaml", "PyTorchJob"), re.MULTILINE)]
    first = command.index("torchrun")
    command = command[first : next(i for i, word in enumerate(command) if word.startswith("--out")) + 1]
    options = command[1 : command.index("-m")]
    assert command[command.index("-m") :][:2] == ["-m", "ftrain.cli"]
    arguments = command[command.index("ftrain.cli") + 1 :]
    main.commands[arguments[0]].make_context(arguments[0], arguments[1:])
    words = ["-m", "ftrain.cli", "train", write_tiny(tmp_path), "--set", "train.steps=2"]
    done = on_two([*TORCHRUN, *options, *words], tmp_path, **variables)
    assert [process.returncode for process in done] == [0, 0], [process.stderr for process in done]
    assert any("2 ranks on cpu" in process.stdout for process in done)


# --- the script for Slurm -------------------------------------------------------------------------------------------

SRUN = """#!/bin/bash
# Stands in for Slurm's: the command once for each machine, all at once; the code is the worst of theirs.
pids=() worst=0
for i in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
exit $worst
"""
SCONTROL = """#!/bin/bash
case "$1" in show) echo localhost; echo another;; requeue) echo "$2" >> requeued;; esac
"""


def slurm(folder: Path, torchrun: str) -> subprocess.CompletedProcess:
    """Run the script with stand-ins; torchrun: what that is."""
    tools = folder / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", torchrun)):
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    script = block("bash", "#SBATCH").replace("/shared/runs/8b", str(folder / "out"))
    assert script.count("29400") == 1 and script.count("--nproc-per-node 8") == 1
    script = script.replace("29400", str(free_port())).replace("--nproc-per-node 8", "--nproc-per-node 1")
    (folder / "job.sh").write_text(script.replace("train llama3-8b", f"train {write_tiny(folder)}"))
    env = environment(PATH=f"{tools}:{os.environ['PATH']}", SLURM_JOB_NODELIST="two", SLURM_JOB_NUM_NODES="2")
    env["SLURM_JOB_ID"] = "7"
    return subprocess.run(["bash", "job.sh"], cwd=folder, env=env, text=True, capture_output=True, timeout=150)


def test_the_script_for_slurm_trains_on_two_machines(tmp_path):
    done = slurm(tmp_path, f"#!/bin/bash\nexec {shlex.join(TORCHRUN)} " + '"$@"\n')
    assert done.returncode == 0, done.stderr
    assert "2 ranks on cpu" in done.stdout and not (tmp_path / "requeued").exists()
    assert [step for step, _ in complete(tmp_path / "out" / "checkpoints")] == [3, 6]


@pytest.mark.parametrize(
    ("torchrun", "requeued"),
    [("mkdir -p out/checkpoints/step-00000003; exit 1", ["7"]), ("exit 1", None), ("exit 0", None)],
    ids=["went on and was stopped", "failed where it was", "ended"],
)
def test_the_script_for_slurm_queues_again_what_went_on(tmp_path, torchrun, requeued):
    done = slurm(tmp_path, f"#!/bin/bash\n{torchrun}\n")
    assert done.returncode == int("exit 1" in torchrun)
    file = tmp_path / "requeued"
    assert (file.read_text().split() if file.exists() else None) == requeued


# --- the words ------------------------------------------------------------------------------------------------------


def test_every_exit_code_is_there():
    from ftrain.launch import LOST_PEER

    codes = re.findall(r"^\| ([-\d, ]+) \|", PAGE, re.MULTILINE)
    assert {int(code) for text in codes for code in text.split(",")} == {0, 1, 2, LOST_PEER, 143, 130, -9}


def test_settings_that_are_named_are_there():
    from ftrain.recipe import TABLES

    keys = set(re.findall(r"`((?:" + "|".join(TABLES) + r")\.\w+)", PAGE))
    known = {f"{table}.{name}" for table, cls in TABLES.items() for name in cls.__dataclass_fields__}
    assert keys and keys <= known
