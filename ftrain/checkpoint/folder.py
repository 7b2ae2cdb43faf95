"""Which folders under a root are checkpoints, which of them is the newest complete one, and which may go.

A checkpoint is `step-00000010` with a `manifest.json` that lists every other file and its size. It is written
as `step-00000010.tmp` and renamed when whole. Two more names exist for moments: `.replaced` (a complete one
of a step that is saved again, until the new one stands in its place) and `.removing` (on its way out).
"""

import json
import re
import shutil
import stat
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from ftrain.checkpoint import agree
from ftrain.checkpoint.storage import DATA_FILE, INDEX

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST = 1 << 26  # bytes; a manifest has a line per rank and the recipe
_NAME = re.compile(r"step-(\d{1,18})(|\.tmp|\.replaced|\.removing)")


class Manifest(NamedTuple):
    """What manifest.json says: the files with sizes in bytes, the index's crc32, and facts about the run."""

    step: int
    files: dict[str, int]
    index_crc: int
    meta: dict[str, Any]


def folder_name(step: int) -> str:
    """`step-00000010`: zero-padded so that a plain listing is in order."""
    return f"step-{step:08d}"


def encode_manifest(manifest: Manifest) -> str:
    """The text of manifest.json. Raises TypeError or ValueError for a meta that JSON cannot hold."""
    return json.dumps({"format": FORMAT, **manifest._asdict()}, indent=2, allow_nan=False) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read and check manifest.json and the sizes of its files. Raises CheckpointError with the reason."""
    size = _file_size(path / MANIFEST)
    if size is None:
        raise agree.CheckpointError("it has no manifest.json: the save was interrupted, or this is not a checkpoint")
    if size > MAX_MANIFEST:
        raise agree.CheckpointError(f"its manifest.json has {size} bytes, more than {MAX_MANIFEST}")
    try:
        raw = json.loads((path / MANIFEST).read_bytes())
        if raw["format"] != FORMAT:
            raise agree.CheckpointError(f"it has format {raw['format']!r}; this ftrain reads format {FORMAT}")
        manifest = Manifest(raw["step"], raw["files"], raw["index_crc"], raw["meta"])
        numbers = (manifest.step, manifest.index_crc, *manifest.files.values())
        names_are_ours = all(DATA_FILE.fullmatch(name) or name == INDEX for name in manifest.files)
        if not names_are_ours or INDEX not in manifest.files or not isinstance(manifest.meta, dict):
            raise ValueError("it lists files that no checkpoint has, or lacks some that every one has")
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError("sizes and steps must be integers from 0 up")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise agree.CheckpointError(f"its manifest.json is damaged ({type(error).__name__}: {error})") from error
    for name, expected in sorted(manifest.files.items()):
        size = _file_size(path / name)
        if size is None:
            raise agree.CheckpointError(f"its file {name} is missing")
        if size != expected:
            raise agree.CheckpointError(f"its file {name} has {size} bytes and should have {expected}")
    return manifest


def read_index_text(path: Path, manifest: Manifest) -> str:
    """The text of index.json, checked against the manifest's crc32."""
    data = (path / INDEX).read_bytes()
    if zlib.crc32(data) != manifest.index_crc:
        raise agree.CheckpointError(f"its file {INDEX} is damaged (wrong checksum)")
    return data.decode()


def read_meta(path: Path | str) -> dict[str, Any]:
    """The facts saved with a checkpoint (step, seed, recipe...), not its tensors. Raises CheckpointError."""
    reason = fault(path)
    if reason:
        raise agree.CheckpointError(f"cannot read {path}: {reason}")
    return read_manifest(Path(path)).meta


def fault(path: Path | str) -> str | None:
    """Why the folder `path` is not a complete checkpoint, or None if it is. Looks at all files' sizes."""
    path = Path(path)
    if not path.is_dir():
        return "there is no such folder" if not path.exists() else "it is not a folder"
    match = _NAME.fullmatch(path.name)
    if match and match[2] == ".tmp":
        return "its save did not finish"
    if match and match[2] == ".removing":
        return "it was being removed"
    try:
        manifest = read_manifest(path)
    except agree.CheckpointError as error:
        return str(error)
    if match and int(match[1]) != manifest.step:
        return f"its manifest.json is of step {manifest.step}"
    return None


def complete(root: Path | str) -> list[tuple[int, Path]]:
    """(step, path) of every complete checkpoint under `root`, in order of step. Not a collective."""
    return sorted({step: path for step, path, reason in _survey(root) if reason is None}.items())


def latest(root: Path | str, *, group: Any = None) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest complete checkpoint under `root` or None, and the newer folders passed over, with why.

    Newest is by step number. With a process group this is a collective: rank 0 looks and all get its answer.
    """
    return agree.first(f"look for checkpoints in {root}", lambda: newest(root), group)


def newest(root: Path | str) -> tuple[Path | None, list[tuple[Path, str]]]:
    """`latest` as this rank sees it: not a collective."""
    skipped: list[tuple[Path, str]] = []
    for _, path, reason in reversed(_survey(root)):
        if reason is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def prune(root: Path | str, keep: int, *, protect: Path | None = None) -> list[Path]:
    """Remove complete checkpoints but the newest `keep` (0: none goes) and `protect`. Call it on one rank.

    Only complete ones count as kept, and only complete ones go: a broken folder is evidence, and stays.
    Returns the removed paths. Raises OSError if a folder cannot be removed.
    """
    if keep < 0:
        raise ValueError(f"keep must be 0 (keep all) or more; got {keep}")
    good = complete(root)
    surplus = max(0, len(good) - keep) if keep else 0
    removed = [path for _, path in good[:surplus] if path != protect]
    for path in removed:
        remove(path)
    return removed


def remove(path: Path) -> None:
    """Remove a checkpoint folder: renamed first, so that no half of it is ever taken for a checkpoint."""
    going = path.with_name(path.name.split(".")[0] + ".removing")
    if path != going:
        shutil.rmtree(going, ignore_errors=True)
        path.rename(going)
    shutil.rmtree(going)


def clear_leftovers(root: Path) -> None:
    """Remove what an interrupted save left behind, and put back a checkpoint it had moved aside."""
    for path in sorted(root.iterdir()):
        match = _NAME.fullmatch(path.name)
        if not match or not match[2] or not path.is_dir():
            continue
        if match[2] in (".tmp", ".removing"):
            shutil.rmtree(path)
            continue
        final = path.with_suffix("")
        if not final.exists():
            path.rename(final)
        elif fault(final) is None:
            remove(path)


def put_in_place(temporary: Path, final: Path) -> None:
    """Rename a whole checkpoint to its name. One that stands there already stays readable until then."""
    aside = None
    if final.exists():
        aside = final.with_suffix(".replaced" if fault(final) is None else ".removing")
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    if aside:
        remove(aside)


def _survey(root: Path | str) -> list[tuple[int, Path, str | None]]:
    """(step, path, fault) of everything under `root` that has a checkpoint's name, in the order of the steps.

    Of two for one step the one under its final name comes last: it is the newer.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    found = [(match, path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    found.sort(key=lambda item: (int(item[0][1]), item[0][2] == "", item[1].name))
    return [(int(match[1]), path, fault(path)) for match, path in found]


def _file_size(path: Path) -> int | None:
    """Size in bytes of a regular file; None if there is none. A link or a device is not one of our files."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
