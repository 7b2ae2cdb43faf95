"""Variants of a benchmark, each in fresh processes, one rank a GPU: how they start, are timed, and become a table.

step_gpu.py and peer_torchtitan.py run on it. A rank leaves what it measured in a file. A variant of which a rank fails,
runs out of memory or hangs is a row that says so; the next one then runs.
"""

import argparse
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from ftrain.spawn import spawn

COLUMNS = ("ms", "min", "max", "tokens/s", "TFLOP/s", "MFU", "GiB", "loss", "norm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every script of ranks has."""
    parser.add_argument("--gpus", type=int, default=1, help="ranks, each on a GPU of this host")
    parser.add_argument("--tensor", type=int, default=1, help="of them in a tensor-parallel group; FSDP over the rest")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run on gloo")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=5, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one variant, compiling included")
    parser.add_argument("--profile", action="store_true", help="kernels by time, and communication that is exposed")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the rank's side: this variant,
    parser.add_argument("--results", help=argparse.SUPPRESS)  # into this folder


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse degrees that do not fit each other."""
    if args.gpus < 1 or args.tensor < 1 or args.gpus % args.tensor:
        parser.error(f"--gpus {args.gpus} --tensor {args.tensor}: expected a positive multiple of --tensor as --gpus.")


def shared(args: argparse.Namespace) -> list[str]:
    """The options of `add_arguments` as words, for the ranks."""
    names = ("gpus", "tensor", "device", "layers", "warmup", "steps", "timeout")
    words = [word for name in names for word in (f"--{name}", str(getattr(args, name)))]
    return words + ["--profile"] * args.profile


# --- the launcher's side --------------------------------------------------------------------------------------------


def print_table(variants: Sequence[tuple[str, list[str]]], args: argparse.Namespace) -> int:
    """Run each (name, command of its ranks) and print its row when it is known. Returns the exit code: 1 where one
    failed."""
    width, failed, told = max(len(name) for name, _ in variants), False, False
    layout = f"{args.gpus} {'GPU' if args.device == 'cuda' else 'CPU rank'}{'s' if args.gpus > 1 else ''}"
    if args.gpus > 1:
        layout += f": FSDP over {args.gpus // args.tensor}, tensor parallel over {args.tensor}; all numbers are of one"
    print(f"{layout}\n{'':{width}s}" + "".join(f" {title:>8s}" for title in COLUMNS), flush=True)
    for name, command in variants:
        found = run_variant(command, args.gpus, args.timeout)
        if isinstance(found, str):
            failed = True
            print(f"{name:{width}s} failed: {found}", flush=True)
            continue
        print(f"{name:{width}s} {row(found)}", flush=True)
        for line in notes(found):
            print(f"{'':{width}s} {line}", flush=True)
        if not told:
            told = True
            print(f"{'':{width}s} on {found[0]['device']}, torch {found[0]['torch']}", flush=True)
    return int(failed)


def run_variant(command: Sequence[str], gpus: int, timeout: float) -> list[dict] | str:
    """What each rank measured, or why there is nothing, in a few words."""
    # NVLink multicast needs a fabric manager that virtual machines often lack, where NCCL then fails or hangs.
    environ = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        code = spawn(gpus, [*command, "--results", folder], environ)
        seconds = time.monotonic() - start
        found = {int(file.stem): json.loads(file.read_text()) for file in Path(folder).glob("*.json")}
    if code > 128:  # a signal to us ends the table
        sys.exit(code)
    if code == 0 and len(found) == gpus:
        return [found[rank] for rank in range(gpus)]
    errors = [result for result in found.values() if "error" in result]
    if errors:  # the first is the cause: the others lost a peer
        return min(errors, key=lambda result: result["at"])["error"]
    return f"no end within {timeout:g} s" if seconds >= timeout else f"exit code {code}"


def row(ranks: Sequence[dict]) -> str:
    """A line of the table: the slowest rank's time, numbers of one GPU, and the least and most memory of a rank."""
    times = max((rank["times"] for rank in ranks), key=statistics.median)
    ms, first = statistics.median(times), ranks[0]
    tokens = first["tokens"] / len(ranks) / ms * 1e3
    flops = first["flops_per_token"] * tokens
    mfu = f"{100 * flops / first['peak_flops']:.1f}%" if first["peak_flops"] else "-"
    least, most = (f"{of(rank['peak_gib'] for rank in ranks):.1f}" for of in (min, max))
    gib = most if least == most else f"{least}-{most}"
    norm = "-" if first["grad_norm"] is None else f"{first['grad_norm']:.3f}"
    cells = [f"{ms:.1f}", f"{min(times):.1f}", f"{max(times):.1f}", f"{tokens:.0f}", f"{flops / 1e12:.1f}", mfu, gib]
    return " ".join(f"{cell:>8s}" for cell in (*cells, f"{first['loss']:.4f}", norm))


def notes(ranks: Sequence[dict]) -> list[str]:
    """What a profile told of each rank."""
    if ranks[0]["profile"] is None:
        return []
    lines = []
    for what, key in (("exposed communication", "exposed"), ("all communication", "wire"), ("idle", "idle")):
        shares = " ".join(f"{100 * rank['profile'][key]:.1f}" for rank in ranks)
        lines.append(f"{what}, % of the step, rank by rank: {shares}")
    return lines


# --- a rank's side --------------------------------------------------------------------------------------------------


def write_result(measure: Callable[[], dict], args: argparse.Namespace) -> None:
    """Measure, and leave the result or the error where the launcher looks for it. Ends this process when it failed,
    or when it took longer than its timeout: all threads' stacks are then on stderr."""
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    file = Path(args.results, f"{os.environ['RANK']}.json")
    try:
        file.write_text(json.dumps(measure()))
    except Exception as error:
        file.write_text(json.dumps({"error": _why(error), "at": time.time()}))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # leaving in good order may wait for a peer


def _why(error: Exception) -> str:
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:160]


def timed(step: Callable[[], tuple], args: argparse.Namespace, device, *, tokens: int, flops_per_token: float) -> dict:
    """Time `step() -> (loss, gradient norm or None)` on this rank, then profile it where that was asked for.

    tokens: in a step of all ranks.
    """
    import torch
    from exposed import profile

    from ftrain.throughput import memory_bytes, peak_flops

    cuda = device.type == "cuda"
    for _ in range(args.warmup):
        loss, norm = step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        # From one step's start to the next one's, without waiting in between, as in training.
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)]
        for mark in marks[:-1]:
            mark.record()
            loss, norm = step()
        marks[-1].record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]
    else:
        clock = [time.perf_counter()]
        for _ in range(args.steps):
            loss, norm = step()
            clock.append(time.perf_counter())
        times = [1e3 * (b - a) for a, b in zip(clock, clock[1:], strict=False)]
    name = torch.cuda.get_device_name(device) if cuda else "cpu"
    result = {
        "times": times,
        "peak_gib": memory_bytes(device) / 2**30,
        "tokens": tokens,
        "flops_per_token": flops_per_token,
        "peak_flops": peak_flops(name),
        "loss": float(loss),
        "grad_norm": None if norm is None else float(norm),
        "device": name,
        "torch": torch.__version__,
    }
    shares = profile(step, device, args.one if os.environ["RANK"] == "0" else None) if args.profile else None
    return result | {"profile": shares and shares._asdict()}
