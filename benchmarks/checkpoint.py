"""What a checkpoint costs: `python -m benchmarks.checkpoint [--dir DIR] [--rounds N] [--json]`.

- Saved beside training, it may add at most the time of one step to the step it happens in. The debug model trains;
  what is timed is the call between two steps that copies the state and starts the writing.
- Bytes a second, on disk when the clock stops (fsync), against torch.save of the same tensors into one file: at least
  0.8 times. The two take turns, and the best of each counts: what else the machine does can only add time. Of a
  checkpoint all counts: the look for Inf and NaN, checksums, index, manifest, renaming.

Exit code 1 where a bar is missed.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

STALL_BAR, SPEED_BAR = 1.0, 0.8
BIG_BYTES = 256 << 20
STALL_ROUNDS = 3
RECIPE = ("data.source=synthetic", "train.compile=false")


def seconds(fn) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def stall(folder: Path, rounds: int) -> dict:
    """Median seconds of a step, of the call that starts a save after one, and of a step beside the writing."""
    import ftrain
    from ftrain import checkpoint
    from ftrain.step import stored

    run = ftrain.Run(ftrain.load_recipe("debug", RECIPE), device="cpu")
    state = run.init()

    def step():
        nonlocal state
        state, metrics = run.step(state, run.batch(state.step))
        float(metrics["loss"])

    def save():
        return checkpoint.save_async(folder / "stall", stored(state), step=state.step, meta={}, keep=1)

    step(), save().wait()
    alone, starting, beside = [], [], []
    for _ in range(rounds):
        alone += [seconds(step), seconds(step)]
        start = time.perf_counter()
        pending = save()
        starting.append(time.perf_counter() - start)
        while not pending.done():
            beside.append(seconds(step))
        pending.wait()
    alone_, starting_ = statistics.median(alone), statistics.median(starting)
    return {
        "step_seconds": alone_,
        "save_seconds": starting_,
        "step_beside_seconds": statistics.median(beside) if beside else None,
        "added_steps": starting_ / alone_,
    }


def speed(folder: Path, tensors: dict, rounds: int) -> dict:
    """Bytes a second of a checkpoint and of torch.save, each the best over rounds."""
    import torch

    from ftrain import checkpoint

    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    names = itertools.count()

    # Before each, what is still to be written is written: removing files makes work for the disk's next commit.
    def ours():
        os.sync()
        root = folder / f"ours {next(names)}"
        spent = seconds(lambda: checkpoint.save(root, tensors, step=1, meta={}, keep=1))
        shutil.rmtree(root)
        return total / spent

    def plain():
        os.sync()
        path = folder / f"plain {next(names)}"

        def write():
            with open(path, "wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())

        spent = seconds(write)
        path.unlink()
        return total / spent

    ours(), plain()
    pairs = [(ours(), plain()) for _ in range(rounds)]
    best, plain_best = max(a for a, _ in pairs), max(b for _, b in pairs)
    return {
        "bytes": total,
        "checkpoint_bytes_per_second": best,
        "torch_save_bytes_per_second": plain_best,
        "ratio": best / plain_best,
    }


def states() -> dict:
    """What is written for speed: the debug model with its moments, and a larger state of large tensors."""
    import torch

    import ftrain
    from ftrain import tree

    state = ftrain.Run(ftrain.load_recipe("debug", RECIPE), device="cpu").init()
    leaves = [leaf for leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)]
    return {
        "debug": {f"w{i}": leaf for i, leaf in enumerate(leaves)},
        "large": {f"w{i}": torch.randn(BIG_BYTES // 32 // 4) for i in range(32)},
    }


def main() -> int:
    """Measure, print, and say whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=None, help="a folder on the disk to measure; default: the temporary folder's")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        result = {"stall": stall(folder, STALL_ROUNDS)}
        for which, tensors in states().items():  # the small one is over in no time, and easily disturbed
            result[which] = speed(folder, tensors, options.rounds * (4 if which == "debug" else 1))
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    fine = result["stall"]["added_steps"] <= STALL_BAR
    return 0 if fine and all(result[which]["ratio"] >= SPEED_BAR for which in ("debug", "large")) else 1


def show(result: dict) -> None:
    """The numbers as lines, each with its bar."""
    took = result["stall"]
    print(f"a step of the debug model          {took['step_seconds'] * 1e3:7.1f} ms")
    print(f"the start of a save, after a step  {took['save_seconds'] * 1e3:7.1f} ms")
    if took["step_beside_seconds"]:
        print(f"a step beside the writing          {took['step_beside_seconds'] * 1e3:7.1f} ms")
    print(f"a save adds to its step            {took['added_steps']:7.2f} steps (at most {STALL_BAR})")
    for which in ("debug", "large"):
        rates = result[which]
        print(
            f"{which:5} state, {rates['bytes'] / 2**20:5.0f} MiB: checkpoint "
            f"{rates['checkpoint_bytes_per_second'] / 1e6:.0f} MB/s, torch.save "
            f"{rates['torch_save_bytes_per_second'] / 1e6:.0f} MB/s, "
            f"{rates['ratio']:.2f} times (at least {SPEED_BAR})"
        )


if __name__ == "__main__":
    sys.exit(main())
