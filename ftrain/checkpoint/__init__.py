"""Checkpoints: a training state written whole or not at all, and read into any layout, without running code.

`save` and `save_async` write `root/step-00000010`; `latest` finds the newest complete one; `load` reads it
into the structure and sharding of a state. torch.distributed.checkpoint plans which rank writes and reads
which piece; what lies on disk is JSON and raw bytes, never a pickle. docs/checkpoints.md has the layout on
disk and the guarantees.
"""

from ftrain.checkpoint.agree import CheckpointError, each
from ftrain.checkpoint.agree import first as agreed
from ftrain.checkpoint.folder import complete, fault, latest, newest, prune, read_meta
from ftrain.checkpoint.load import load, schema
from ftrain.checkpoint.save import PendingSave, save, save_async

__all__ = [
    "CheckpointError",
    "PendingSave",
    "agreed",
    "complete",
    "each",
    "fault",
    "latest",
    "load",
    "newest",
    "prune",
    "read_meta",
    "save",
    "save_async",
    "schema",
]
