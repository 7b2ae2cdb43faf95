"""What `data.source` names: the files of a corpus, in a fixed order, cut into units of work.

A file's *name* is its path relative to the fixed part of the glob that found it (or to the standard library),
with forward slashes. Order and the held-out split depend on names only, so a corpus may move from disk to disk.
"""

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .errors import DataError
from .files import line_starts
from .hub import HF, hf_version, load_hf
from .parquet import group_starts

STDLIB = "stdlib"
SYNTHETIC = "synthetic"

TEXT = (".txt", ".md", ".rst", ".py")
JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
COMPRESSED = (".gz", ".zst")

# Left out of the standard library: other people's packages, and tests, which some systems do not install and
# which hold files that are broken on purpose. What is left is 12 MB in 700 files on Python 3.11.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

UNIT_BYTES = 64 << 20
MAX_UNITS = 16_384  # each is a mapped file, and Linux allows a process 65,530 maps


class Slice(NamedTuple):
    """A file, or a part of it.

    kind: "text" (the file is one document), "jsonl", "parquet" or "hf" (a document a record). start, stop: a
    range of bytes that begins and ends with a line (jsonl), of row groups (parquet), of shards (hf); a stop
    of None is the whole file. n_bytes: its size on disk, about. version: of the data (hf)."""

    path: str
    name: str
    kind: str
    n_bytes: int
    start: int = 0
    stop: int | None = None
    version: str = ""


Unit = tuple[Slice, ...]


def find_files(source: str) -> list[Slice]:
    """The files that `source` ("stdlib", "hf:NAME", or a path or glob) names, whole, sorted by name.

    Raises DataError where there are none, or where one is of a kind that cannot be read."""
    if source == STDLIB:
        return stdlib_files()
    if source.startswith(HF):
        return [Slice(source, source, "hf", 0, version=hf_version(source))]
    pattern = os.path.expanduser(source)
    if not glob.has_magic(pattern):
        paths, root = [pattern], os.path.dirname(pattern)
        if os.path.isdir(pattern):
            example = f"{source}/**/*.jsonl"
            raise DataError(f"data.source: {source} is a folder; give a glob of files, such as {example}")
        if not os.path.exists(pattern):
            raise DataError(f"data.source: there is no file {source} (looked in {Path.cwd()})")
    else:
        paths, root = glob.glob(pattern, recursive=True), _fixed_part(pattern)
        paths = [path for path in paths if not os.path.isdir(path)]
        if not paths:
            raise DataError(f"data.source: no file matches {source} (looked in {Path.cwd()})")
    return _sorted((path, os.path.relpath(path, root or "."), _kind(path)) for path in paths)


def stdlib_files() -> list[Slice]:
    """The .py files of the running Python's own library, without tests and installed packages."""
    root = sysconfig.get_path("stdlib")
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        paths = [os.path.join(folder, name) for name in names if name.endswith(".py")]
        found += [(path, os.path.relpath(path, root), "text") for path in paths]
    if not found:
        raise DataError(f'data.source = "stdlib": this Python has no library source (.py files) under {root}')
    return _sorted(found)


def cut_into_units(files: Iterable[Slice], unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Units of work of about `unit_bytes`, in order: small files together, large ones in slices where their
    kind allows it."""
    files = list(files)
    unit_bytes = max(unit_bytes, sum(file.n_bytes for file in files) // MAX_UNITS)
    units: list[list[Slice]] = []
    room = 0
    for slice_ in (slice_ for file in files for slice_ in _slices(file, unit_bytes)):
        if not units or slice_.n_bytes > room or slice_.kind == "hf":
            units.append([])
            room = unit_bytes
        units[-1].append(slice_)
        room -= slice_.n_bytes
    return [tuple(unit) for unit in units]


def _slices(file: Slice, unit_bytes: int) -> Iterator[Slice]:
    """A file whole if it is small or cannot be cut, else in slices of about unit_bytes."""
    large = file.n_bytes > unit_bytes and not file.path.endswith(COMPRESSED)
    starts, end = [0], 1
    if file.kind == "hf":
        end = load_hf(file.path).num_shards
        starts = list(range(end))
    elif file.kind == "jsonl" and large:
        starts, end = line_starts(file.path, file.n_bytes, unit_bytes), file.n_bytes
    elif file.kind == "parquet" and large:
        starts, end = group_starts(file.path, file.n_bytes, unit_bytes)
    if len(starts) < 2:
        yield file
        return
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        yield file._replace(n_bytes=file.n_bytes // len(starts), start=start, stop=stop)


def _sorted(found: Iterable[tuple[str, str, str]]) -> list[Slice]:
    files = [Slice(path, Path(name).as_posix(), kind, os.path.getsize(path)) for path, name, kind in found]
    return sorted(files, key=lambda file: file.name)


def _fixed_part(pattern: str) -> str:
    """The folders of a glob before its first wildcard."""
    parts = pattern.split(os.sep)
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return os.sep.join(parts[:first]) or (os.sep if pattern.startswith(os.sep) else "")


def _kind(path: str) -> str:
    stem, ending = os.path.splitext(path)
    compressed = ending in COMPRESSED
    if compressed:
        ending = os.path.splitext(stem)[1]
    if ending in TEXT:
        return "text"
    if ending in JSONL:
        return "jsonl"
    if ending in PARQUET and not compressed:
        return "parquet"
    known = f"{' '.join(TEXT + JSONL)} (also with .gz or .zst after them) and {' '.join(PARQUET)}"
    raise DataError(f"data.source: {path} is of no kind that ftrain reads: {known}")
