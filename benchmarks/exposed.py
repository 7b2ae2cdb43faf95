"""What ran on a GPU in a step: each kernel's time, how long nothing ran, and communication that nothing hid.

Communication is exposed while a collective's kernel runs and no other kernel does, on the same rank. A collective's
kernel waits for its peers, and that is counted: what a rank loses to a slower one is exposed too.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
STEPS = 3  # that are profiled; the first starts on a GPU that waits, and is left out


class Kernel(NamedTuple):
    """One kernel, from start to end in milliseconds of a clock of its own."""

    start: float
    end: float
    name: str

    @property
    def is_collective(self) -> bool:
        """Whether it is the transport's: NCCL's on a GPU, gloo's work on a CPU."""
        return self.name.startswith(("nccl", "gloo:"))


class Shares(NamedTuple):
    """Parts of the time from the first kernel's start to the last one's end, `span` milliseconds.

    wire: a collective runs; exposed: a collective runs and nothing else does; idle: nothing runs.
    """

    span: float
    wire: float
    exposed: float
    idle: float


def shares(kernels: Iterable[Kernel]) -> Shares:
    """Raises ValueError where there is no kernel."""
    kernels = list(kernels)
    if not kernels:
        raise ValueError("no kernel was seen: the profiler recorded nothing on this device.")
    span = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)
    wire = covered(kernel for kernel in kernels if kernel.is_collective)
    compute, either = covered(kernel for kernel in kernels if not kernel.is_collective), covered(kernels)
    return Shares(span, wire / span, (either - compute) / span, 1 - either / span)


def covered(kernels: Iterable[Kernel]) -> float:
    """Milliseconds in which at least one of them runs."""
    total, reach = 0.0, float("-inf")
    for start, end, _ in sorted(kernels):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def read(trace: Path) -> list[Kernel]:
    """The kernels of a trace that torch's profiler wrote, by their start. Of a run on a CPU: operators, gloo's work."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    found = [event for event in events if event.get("cat") in ON_GPU]
    found = found or [event for event in events if event["name"].startswith(("aten::", "gloo:"))]
    return sorted(Kernel(e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3, e["name"]) for e in found)


def profile(step: Callable[[], object], device, name: str | None) -> Shares:
    """The shares of the last two of three steps in a row. name: of the variant, to print its kernels; None: do not."""
    import torch
    from torch.profiler import ProfilerActivity

    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as profiler:
        for _ in range(STEPS):
            step()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        kernels = read(trace)
    kernels = kernels[len(kernels) // STEPS :]  # each step launches the same ones
    found = shares(kernels)
    if name is not None and cuda:
        print_kernels(kernels, found, name)
    return found


def print_kernels(kernels: list[Kernel], found: Shares, name: str) -> None:
    """Kernels by the time they take in a step, and the longest times in which none ran."""
    steps = STEPS - 1
    span, busy = found.span / steps, found.span * (1 - found.idle) / steps
    print(f"{name}: span {span:.1f} ms, busy {busy:.1f} ms a step, idle {100 * found.idle:.1f}%")
    times: dict[str, list[float]] = defaultdict(list)
    gaps, last = [], kernels[0]
    for kernel in kernels:
        times[kernel.name].append(kernel.end - kernel.start)
        gaps.append((kernel.start - last.end, last.name, kernel.name))
        last = max(last, kernel, key=lambda kernel: kernel.end)
    rows = sorted(((sum(each), len(each), kernel) for kernel, each in times.items()), reverse=True)
    for ms, count, kernel in rows[:60]:
        print(f"  {ms / steps:8.2f} ms  x{count / steps:<5.0f} {kernel[:110]}")
    for ms, before, after in sorted(gaps, reverse=True)[:12]:
        print(f"  idle {ms:.2f} ms between {before[:50]} and {after[:50]}", flush=True)
