"""What this machine has, and whether a run fits in it."""

import os
from pathlib import Path

import torch

# A container's limit: of cgroup version 2, and of version 1.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_bytes(device: torch.device) -> int:
    """All the memory of a GPU, or of this machine: what a container may use of it, where that is less."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in LIMITS if path.is_file()]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def too_large(state_bytes: int, device: torch.device, ranks: int) -> str | None:
    """Why parameters and optimizer state of so many bytes a rank cannot be held, in a sentence; None where they can.

    ranks: on this machine. They share its memory; a GPU is a rank's own. Gradients and activations come on top.
    """
    if device.type not in ("cpu", "cuda"):
        return None
    gpu = device.type == "cuda"
    need, has = state_bytes * (1 if gpu else ranks), memory_bytes(device)
    if need <= has:
        return None
    whose = "" if gpu or ranks == 1 else f" of the {ranks} ranks here"
    where = "this GPU" if gpu else "this machine" if torch.cuda.is_available() else "this machine (no GPU is found)"
    return (
        f"parameters and optimizer state{whose} take {need / 2**30:.1f} GiB, and {where} has {has / 2**30:.1f} GiB. "
        "Use a smaller model, or share them among more ranks on more machines (parallel.shard); "
        "`ftrain inspect-sharding` says what a rank needs."
    )
