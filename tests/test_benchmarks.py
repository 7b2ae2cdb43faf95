"""The benchmarks of several GPUs: their script runs on gloo, a variant that fails ends nothing, exposure is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.exposed import Kernel, read, shares
from benchmarks.ranks import row, run_variant

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.slow
def test_each_variant_is_a_row_on_two_ranks_and_one_that_cannot_run_ends_nothing():
    # Without codes that travel no shard of them can be kept: "fp8" cannot run.
    small = "data.seq_len=32 model.dim=32 model.ffn_dim=64 train.compile=false fp8.all_gather=false".split()
    command = [sys.executable, str(FOLDER / "step_gpu.py"), "bf16", "fp8", "rowwise", "--profile"]
    command += "--gpus 2 --device cpu --recipe debug --layers 1 --warmup 1 --steps 2 --timeout 100".split()
    command += [word for override in small for word in ("--set", override)]
    path = os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if not line.startswith(" ")}
    assert list(rows) == ["2", "bf16", "fp8", "rowwise"], done.stdout
    assert "failed: RecipeError" in rows["fp8"] and "fp8.cache_shards" in done.stderr
    for name in ("bf16", "rowwise"):
        ms, least, most, tokens, *_ = map(float, rows[name].replace("-", "0").split()[1:5])
        assert least <= ms <= most and tokens == pytest.approx(32e3 / ms, rel=0.02)
    exposed = [line.split(":")[1].split() for line in done.stdout.splitlines() if "exposed communication" in line]
    assert len(exposed) == 2 and all(len(ranks) == 2 and min(map(float, ranks)) >= 0 for ranks in exposed)


def variant(code: str, timeout: float, gpus: int = 2) -> list[dict] | str:
    """What the launcher makes of ranks that measure so."""
    lines = (
        f"import argparse, os, sys, time; sys.path.insert(0, {str(FOLDER)!r}); import ranks; rank = os.environ['RANK']",
        f"args = argparse.Namespace(timeout={timeout}, results=sys.argv[-1])",
        f"ranks.write_result(lambda: {code}, args)",
    )
    return run_variant([sys.executable, "-c", "\n".join(lines)], gpus, timeout)


def test_ranks_that_hang_are_ended_and_say_where(capfd):
    assert variant("time.sleep(60)", 1) == "no end within 1 s"
    assert "write_result" in capfd.readouterr().err


def test_the_error_that_came_first_is_told():
    # Rank 0 fails after rank 1 has, as one that lost a peer does.
    waited = "[time.sleep(0.01) for _ in iter(lambda: os.path.exists(sys.argv[-1] + '/1.json'), True)]"
    assert variant(f"1 / 0 if rank == '1' else ({waited}, {{}}['lost'])", 60) == "ZeroDivisionError: division by zero"


def test_a_row_has_the_slowest_ranks_time_and_numbers_of_one_gpu():
    ranks = [
        {"times": times, "peak_gib": gib, "tokens": 8000, "flops_per_token": 1e9, "peak_flops": 100e12}
        | {"loss": 2.0, "grad_norm": None}
        for times, gib in (([100.0, 90.0, 110.0], 10.0), ([200.0, 190.0, 230.0], 12.5))
    ]
    assert row(ranks).split() == "200.0 190.0 230.0 20000 20.0 20.0% 10.0-12.5 2.0000 -".split()


# --- exposed communication ------------------------------------------------------------------------------------------


def kernels(**spans: list[tuple[float, float]]) -> list[Kernel]:
    return [Kernel(*span, name) for name, some in spans.items() for span in some]


@pytest.mark.parametrize(
    ("nccl", "gemm", "wire", "exposed", "idle"),
    [
        ([(2, 4)], [(0, 10)], 2, 0, 0),  # all of it under a product
        ([(0, 4)], [(4, 10)], 4, 4, 0),  # none
        ([(3, 8)], [(0, 5), (6, 10)], 5, 1, 0),  # the gap between two products
        ([(1, 5), (2, 6)], [(0, 1), (4, 10)], 5, 3, 0),  # two at once count once
        ([(1, 2), (7, 9)], [(0, 1), (0, 0.5), (3, 6), (9, 10)], 3, 3, 2),  # and what is idle is no exposure
    ],
)
def test_exposed_is_when_a_collective_runs_alone(nccl, gemm, wire, exposed, idle):
    found = shares(kernels(ncclDevKernel_AllGather=nccl, gemm=gemm))
    assert found == pytest.approx((10, wire / 10, exposed / 10, idle / 10))


def test_without_a_collective_nothing_is_exposed():
    assert shares(kernels(gemm=[(5, 7), (8, 9)])) == pytest.approx((4, 0, 0, 1 / 4))
    with pytest.raises(ValueError, match="no kernel was seen"):
        shares([])


def test_of_a_trace_only_what_runs_on_the_gpu_counts(tmp_path):
    events = [
        ("kernel", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 3000, 5000),
        ("gpu_user_annotation", "nccl:_reduce_scatter_base", 1000, 9000),  # names a range; runs nothing
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1000, 1000),
        ("cpu_op", "aten::mm", 0, 9000),
        ("cuda_runtime", "cudaLaunchKernel", 0, 10),
        ("kernel", "gemm", 7000, 1000),
    ]
    keys = ("cat", "name", "ts", "dur")
    trace = [{"ph": "X", **dict(zip(keys, event, strict=True))} for event in events]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*trace, {"ph": "M", "name": "process_name"}]}))
    found = read(tmp_path / "trace.json")
    assert [(k.start, k.end, k.is_collective) for k in found] == [(1, 2, False), (3, 8, True), (7, 8, False)]
    assert shares(found) == pytest.approx((7, 5 / 7, 4 / 7, 1 / 7))
