"""Time the real training step on one GPU: `python benchmarks/step_gpu.py NAME [NAME ...] [--layers 8] [--profile]`.

Every NAME is one line of VARIANTS: a shipped recipe's dims with overrides. Each runs in a process of its own, so that
compilers and allocators start fresh; a table is printed last. Losses are of random tokens: only speed and memory mean
anything here.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

BASE = (
    "data.source=synthetic",
    "data.seq_len=8192",
    "data.global_batch_size=1",
    "train.micro_batch_size=1",
    "train.compile=true",
    "train.steps=1000",
    "schedule.warmup_steps=20",
    "optimizer.clip_norm=1.0",
    "train.remat=none",
)
VARIANTS = {
    "bf16": ("fp8.recipe=none",),
    "fp8": ("fp8.recipe=tensorwise", "fp8.cache_shards=true"),
    "fp8-uncached": ("fp8.recipe=tensorwise",),
    "fp8-output": ("fp8.recipe=tensorwise", "fp8.cache_shards=true", "fp8.skip=[]"),
    "fp8-inline": ("fp8.recipe=tensorwise", "fp8.precompute_scales=false"),
    "delayed": ("fp8.recipe=delayed", "fp8.precompute_scales=false"),
    "rowwise": ("fp8.recipe=rowwise", "fp8.all_gather=false", "fp8.precompute_scales=false"),
    "bf16-remat": ("fp8.recipe=none", "train.remat=full"),
    "fp8-remat": ("fp8.recipe=tensorwise", "fp8.cache_shards=true", "train.remat=full"),
}


def measure(name: str, recipe: str, overrides: list[str], warmup: int, steps: int, profile: bool) -> dict:
    import torch

    import ftrain

    run = ftrain.Run(ftrain.load_recipe(recipe, (*BASE, *VARIANTS[name], *overrides)))
    state = run.init()
    batch = run.batch(0)
    for _ in range(warmup):
        state, metrics = run.step(state, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # From one step's start to the next one's, without waiting in between, as in training.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for mark in marks[:-1]:
        mark.record()
        state, metrics = run.step(state, batch)
    marks[-1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]
    ms = statistics.median(times)
    tokens = run.recipe.data.global_batch_size * run.recipe.data.seq_len
    result = {
        "name": name,
        "ms": ms,
        "min": min(times),
        "max": max(times),
        "tokens_per_second": tokens / ms * 1e3,
        "tflops": run.flops_per_token * tokens / ms / 1e9,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": metrics["loss"].item(),
        "grad_norm": metrics["grad_norm"].item(),
    }
    if profile:
        print_profile(lambda: run.step(state, batch), name)
    return result


def print_profile(step, name: str) -> None:
    """Kernels of a step by time, and how long the GPU was idle: of the last two of three steps in a row, since the
    first starts on a GPU that waits."""
    import torch
    from torch.profiler import ProfilerActivity

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    kernels = sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in profile.events() if str(e.device_type).endswith("CUDA")
    )
    kernels = kernels[len(kernels) // 3 :]
    busy, reach, gaps, before = 0.0, kernels[0][0], [], ""
    for start, end, kernel in kernels:
        gaps.append((start - reach, before, kernel))
        busy += max(0.0, end - max(start, reach))
        if end > reach:
            reach, before = end, kernel
    span = reach - kernels[0][0]
    rows = [
        (e.self_device_time_total / 3e3, e.count / 3, e.key)
        for e in profile.key_averages()
        if e.self_device_time_total > 0
    ]
    rows = [row for row in rows if not row[2].startswith(("aten::", "cuda", "autograd", "Torch", "ProfilerStep"))]
    print(f"{name}: span {span / 2e3:.1f} ms, busy {busy / 2e3:.1f} ms a step, idle {100 * (1 - busy / span):.1f}%")
    for ms, count, key in sorted(rows, reverse=True)[:60]:
        print(f"  {ms:8.2f} ms  x{count:<5.0f} {key[:110]}")
    for us, before, after in sorted(gaps, reverse=True)[:12]:
        print(f"  idle {us / 1e3:.2f} ms between {before[:50]} and {after[:50]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(VARIANTS))
    parser.add_argument("--recipe", default="llama3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=5, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    overrides = [f"model.n_layers={args.layers}", *args.overrides]
    if args.one:
        print(
            "RESULT",
            json.dumps(measure(args.one, args.recipe, overrides, args.warmup, args.steps, args.profile)),
            flush=True,
        )
        return
    results = []
    for name in args.names:
        command = [sys.executable, __file__, "--one", name, "--recipe", args.recipe, "--layers", str(args.layers)]
        command += ["--warmup", str(args.warmup), "--steps", str(args.steps), *(["--profile"] if args.profile else [])]
        command += [part for override in args.overrides for part in ("--set", override)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        *log, last = done.stdout.strip().splitlines() or [""]
        print("\n".join(log), flush=True)
        results.append(json.loads(last.removeprefix("RESULT ")) if last.startswith("RESULT") else {"name": name})
    print(
        f"{'variant':14s} {'ms':>8s} {'min':>8s} {'max':>8s} {'tokens/s':>9s} {'TFLOP/s':>8s} {'GiB':>6s}"
        f" {'loss':>8s} {'norm':>8s}"
    )
    for r in results:
        if "ms" not in r:
            print(f"{r['name']:14s} failed")
            continue
        print(
            f"{r['name']:14s} {r['ms']:8.1f} {r['min']:8.1f} {r['max']:8.1f} {r['tokens_per_second']:9.0f}"
            f" {r['tflops']:8.0f} {r['peak_gib']:6.1f} {r['loss']:8.4f} {r['grad_norm']:8.3f}"
        )


if __name__ == "__main__":
    main()
