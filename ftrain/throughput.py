"""How fast a run goes: a step's metrics and the time since the last make a record of plain numbers."""

import resource
import sys
import time
from collections import deque
from typing import Any

import torch

from ftrain.run import Run

# Dense bf16 peaks, FLOP/s, from the vendors' data sheets. The first name found in a device's name counts.
PEAKS = {
    "GB200": 2500e12,
    "GB300": 2500e12,
    "B200": 2250e12,
    "B100": 1750e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device_name: str) -> float | None:
    """What a device can do in a second, in bf16, without sparsity; None where not known, as for CPUs."""
    return next((peak for name, peak in PEAKS.items() if name.lower() in device_name.lower()), None)


class Clock:
    """Turns a step's metrics into its record of plain numbers: tokens so far, time, memory, MFU.

    tokens, skipped: how many a run that is gone on with has seen and left out.
    """

    def __init__(self, run: Run, tokens: int = 0, skipped: int = 0):
        self.tokens, self.skipped = tokens, skipped
        self.steps = run.recipe.train.steps
        self.device = run.device
        self.flops_per_token = run.flops_per_token
        peak = peak_flops(torch.cuda.get_device_name(run.device)) if run.device.type == "cuda" else None
        self.peak = peak * run.world.world_size if peak else None
        self.recent: deque[float] = deque(maxlen=20)  # seconds of the latest steps
        self.first = True
        self.restart()

    def restart(self) -> None:
        """What happened since the last step, such as a validation, is not a step's time."""
        self.before = time.perf_counter()

    def read(self, step: int, metrics: dict) -> dict[str, Any]:
        """The record of a step. Waits for the device to have finished it."""
        values = {key: float(value) for key, value in metrics.items()}
        now = time.perf_counter()
        seconds, self.before = now - self.before, now
        if not self.first:  # the first one compiles, and says nothing about the others
            self.recent.append(seconds)
        self.first = False
        counted = int(values.pop("tokens"))
        self.tokens += counted
        if "skipped" in values:
            values["skipped"] = self.skipped = self.skipped + int(values["skipped"])
        rate = counted / seconds
        record = {
            "step": step,
            **values,
            "tokens": self.tokens,
            "tokens_per_second": rate,
            "seconds": seconds,
            "memory_bytes": memory_bytes(self.device),
        }
        return record | ({"mfu": self.flops_per_token * rate / self.peak} if self.peak else {})

    def seconds_left(self, step: int) -> float | None:
        """An estimate from the latest steps; None as long as there is none."""
        return (self.steps - step) * sum(self.recent) / len(self.recent) if self.recent else None


def memory_bytes(device: torch.device) -> int:
    """The most memory used so far: of the GPU by this process, or of the process itself."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
