"""The matrix of fp8 layouts through the command, on gloo ranks and real text; and fp8's loss curve."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ftrain import Run, load_recipe
from ftrain.launch import World

# The debug recipe in small. One rank, and every layout, cuts the batch in the same micro-batches of 2.
SMALL = (
    *(f"model.{k}={v}" for k, v in {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4}.items()),
    "model.head_dim=16",
    "model.ffn_dim=192",
    "data.seq_len=64",
    "train.micro_batch_size=2",
    "precision.compute=bfloat16",
    "validation.sequences=2",
    "checkpoint.every=0",
)
FP8 = ("fp8.recipe=tensorwise", "fp8.skip=[]")
LAYOUTS = {
    "FSDP in the original dtype": (2, ("parallel.shard=2", "precision.gather=params")),
    "FSDP, fp8 all-gather": (2, ("parallel.shard=2", *FP8, "fp8.precompute_scales=false")),
    "FSDP, fp8 all-gather, precomputed scales": (2, ("parallel.shard=2", *FP8)),
    "tensor parallel, fp8 all-gather": (2, ("parallel.tensor=2", *FP8)),
    "FSDP and tensor parallel, fp8 all-gather": (4, ("parallel.shard=2", "parallel.tensor=2", *FP8)),
}
MODES = {"remat": ("train.remat=full", "train.compile=false"), "compile": ("train.compile=true",)}
STEPS = 3


def through_the_command(folder, ranks, *overrides):
    """(loss, grad norm) of each step of `ftrain train debug --nproc ranks`."""
    sets = [word for override in (*SMALL, *overrides, f"train.steps={STEPS}") for word in ("--set", override)]
    command = [sys.executable, "-m", "ftrain.cli", "train", "debug", "--quiet", "--out", str(folder)]
    done = subprocess.run(
        [*command, "--nproc", str(ranks), *sets],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0 and done.stdout == "" and "Error" not in done.stderr, done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)) and "validation_loss" in lines[-1]
    return [(line["loss"], line["grad_norm"]) for line in lines]


def curve(steps, *overrides):
    """(loss, grad norm) of each step on one rank, eager, in this process."""
    recipe = load_recipe("debug", (*SMALL, "train.compile=false", f"train.steps={steps}", *overrides))
    run = Run(recipe, World(), "cpu")
    state, seen = run.init(), []
    for step in range(steps):
        state, metrics = run.step(state, run.batch(step))
        seen.append((metrics["loss"].item(), metrics["grad_norm"].item()))
    return np.array(seen)


@pytest.fixture(scope="module")
def one_rank():
    """Without fp8 and with it."""
    return curve(STEPS), curve(STEPS, *FP8)


@pytest.fixture(scope="module")
def matrix():
    """What each cell saw, for comparisons between cells."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_cell_trains_as_one_rank_does(tmp_path, one_rank, matrix, name, mode):
    """In the first step, and as measured within half of each bound.

    Losses are to 2e-4 and norms to 1.5e-3 those of one eager rank: layouts add in another order, and compiled code
    rounds differently before a cast. FSDP alone does neither: 1e-6. fp8 is within 1e-3 and 1.5e-2 of bfloat16.
    """
    ranks, overrides = LAYOUTS[name]
    seen = matrix[name, mode] = np.array(through_the_command(tmp_path / "out", ranks, *overrides, *MODES[mode]))
    plain, in_fp8 = one_rank
    wanted = in_fp8 if "fp8" in name else plain
    off = abs(seen / wanted - 1)
    exact = mode == "remat" and "tensor" not in name
    assert off[0, 0] < (1e-6 if exact else 2e-4) and off[0, 1] < (1e-6 if exact else 1.5e-3)
    assert abs(seen[0, 0] / plain[0, 0] - 1) < 1e-3 and abs(seen[0, 1] / plain[0, 1] - 1) < 1.5e-2


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_precomputed_scales_change_no_digit(matrix, mode):
    cells = [cell for (name, m), cell in matrix.items() if m == mode and name.startswith("FSDP, fp8")]
    if len(cells) < 2:
        pytest.skip("the cells of the matrix were not run")
    assert (cells[0] == cells[1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_the_loss_curve_of_fp8_stays_with_bfloat16s(name):
    """Over 150 steps, in means of ten: at most 0.1 nats apart, where the loss itself falls by 3.

    Measured: tensorwise 0.034, delayed 0.015, rowwise 0.069; float32 is 0.019 from bfloat16.
    """
    steps = 150
    bf16, in_fp8 = (
        curve(steps, "train.micro_batch_size=8", *options)[:, 0] for options in ((), (*FP8, f"fp8.recipe={name}"))
    )
    apart = (in_fp8 - bf16).reshape(-1, 10).mean(axis=1)
    assert bf16[0] - bf16[-10:].mean() > 2.5
    assert abs(apart).max() < 0.1 and abs(apart[-5:].mean()) < 0.05
