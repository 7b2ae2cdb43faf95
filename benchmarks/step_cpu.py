"""ftrain's step against an ordinary PyTorch loop on the CPU: `python -m benchmarks.step_cpu [CASE ...]`.

The debug recipe's model, batch and accumulation, from the same initial values; `plain_llama.py` is the ordinary loop,
with the faster of torch.optim.AdamW's fused and foreach forms. Contestants take turns step by step, so that whatever
else the machine does hits all alike; where their tensors happen to lie changes the speed of products by a percent or
two, so several processes are run. A ratio is the median of the processes' medians. Memory is measured in a process for
each contestant. Bars: tokens/s at least 0.95 of the ordinary loop in eager and 1.0 compiled; peak memory at most 1.05.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time

CASES = {
    "fp32": ("precision.compute=float32", "train.compile=false"),
    "fp32 compiled": ("precision.compute=float32", "train.compile=true"),
    "bf16": ("precision.compute=bfloat16", "train.compile=false"),
    "bf16 compiled": ("precision.compute=bfloat16", "train.compile=true"),
}
CONTESTANTS = (
    "ftrain",
    "fused",
    "foreach",
)  # the last two: the ordinary loop with either form of its optimizer
BASE = (
    "data.source=synthetic",
    "fp8.recipe=none",
    "parallel.reshard_after_forward=false",  # autocast keeps its bfloat16 weights for the backward: so do we
)
BARS = {False: 0.95, True: 1.0}
MEMORY_BAR = 1.05


def contestant(name, case):
    """`step() -> (loss, norm)` of one contestant, and the tokens in a step."""
    import torch

    import ftrain
    from benchmarks import plain_llama
    from ftrain.sharding import full

    run = ftrain.Run(ftrain.load_recipe("debug", (*BASE, *CASES[case])), device="cpu")
    recipe, batch = run.recipe, run.batch(0)
    tokens = batch["tokens"].numel()
    state = run.init()
    if name == "ftrain":

        def step():
            nonlocal state
            state, metrics = run.step(state, batch)
            return metrics["loss"], metrics["grad_norm"]

        return step, tokens
    model = plain_llama.Llama(run.cfg, recipe.data.seq_len)
    model.load(full(state.params))
    if recipe.train.compile:
        model.compile_parts()
    bf16 = run.execution.compute_dtype == torch.bfloat16
    train = plain_llama.make_step(model, recipe.optimizer, micro_batches=run.micro_batches, bf16=bf16, optimizer=name)
    clip, adam = state.opt_state
    counter, rate, count = adam._replace(mu=None, nu=None), run.optimizer.lr, 0

    def step_plain():
        nonlocal count
        lr = rate((clip, counter._replace(count=count)))
        count += 1
        return train(batch, lr)

    return step_plain, tokens


def race(case, rounds):
    """Seconds of wall and of CPU for every step of every contestant, after they have been seen to agree."""
    steps = {name: contestant(name, case) for name in CONTESTANTS}
    losses = {name: [float(step()[0]) for _ in range(3)] for name, (step, _) in steps.items()}
    tolerance = 1e-4 if case.startswith("fp32") else 3e-2
    for name in CONTESTANTS[1:]:
        for ours, theirs in zip(losses["ftrain"], losses[name], strict=True):
            assert abs(ours - theirs) <= tolerance * theirs, f"not the same model: {losses}"
    times = {name: [] for name in CONTESTANTS}
    for i in range(rounds):
        for name in (*CONTESTANTS[i % 3 :], *CONTESTANTS[: i % 3]):
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name][0]()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {"times": times, "tokens": steps["ftrain"][1]}


def memory(case, name):
    """Peak bytes of one contestant's steps: of the process, and of its tensors."""
    import torch

    step, _ = contestant(name, case)
    for _ in range(2):
        step()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # the peak starts anew: compiling took more than any step will
    for _ in range(3):
        step()
    with open("/proc/self/status") as f:
        process = next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) * 1024
    gc.collect()
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors()}
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = sorted(
        (e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    )
    live = peak = sum(storages.values())
    for _, change in events:
        live += change
        peak = max(peak, live)
    return {"process": process, "tensors": peak, "between steps": sum(storages.values())}


def tensors():
    import torch

    return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]


def in_process(*arguments):
    """What this script prints when told to measure one thing."""
    command = [sys.executable, "-m", "benchmarks.step_cpu", "--one", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    if done.returncode:
        raise SystemExit(f"measuring {' '.join(map(str, arguments))} failed")
    return json.loads(done.stdout.splitlines()[-1])


def report(case, rounds, processes):
    """Print one case's lines of speed and of memory."""
    races = [in_process("race", case, rounds) for _ in range(processes)]
    medians = [
        {name: [statistics.median(t[i] for t in raced["times"][name]) for i in (0, 1)] for name in CONTESTANTS}
        for raced in races
    ]
    plain = min(CONTESTANTS[1:], key=lambda name: statistics.median(m[name][0] for m in medians))
    ours, theirs = (races[0]["tokens"] / statistics.median(m[name][0] for m in medians) for name in ("ftrain", plain))
    ratios = [
        [statistics.median(b[i] / a[i] for a, b in zip(t["ftrain"], t[plain], strict=True)) for i in (0, 1)]
        for t in (raced["times"] for raced in races)
    ]
    wall, cpu = (sorted(ratio[i] for ratio in ratios) for i in (0, 1))
    print(
        f"{case:14s} {ours:7.0f} tokens/s, ordinary loop ({plain}) {theirs:7.0f}: {statistics.median(wall):.3f}x "
        f"by the clock ({wall[0]:.3f} to {wall[-1]:.3f}), {statistics.median(cpu):.3f}x by CPU time; "
        f"bar {BARS['compiled' in case]}",
        flush=True,
    )
    ours, theirs = (in_process("memory", case, name) for name in ("ftrain", plain))
    for kind, bar in (("process", f"; bar {MEMORY_BAR}"), ("tensors", f"; bar {MEMORY_BAR}"), ("between steps", "")):
        mib = (memory[kind] / 2**20 for memory in (ours, theirs))
        print(
            f"{'':14s} {kind:13s} {next(mib):6.1f} MiB, ordinary loop {next(mib):6.1f}: "
            f"{ours[kind] / theirs[kind]:.3f}x{bar}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each contestant in a process")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        what, case, last = args.one
        result = race(case, int(last)) if what == "race" else memory(case, last)
        print(json.dumps(result))
        return
    unknown = [case for case in args.cases if case not in CASES]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not a case; there are {', '.join(CASES)}")
    import torch

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}", flush=True)
    for case in args.cases or CASES:
        report(case, args.rounds, args.processes)


if __name__ == "__main__":
    main()
