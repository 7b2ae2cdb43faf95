"""What `data.source` names: the files of a corpus, in a fixed order.

A file's *name* is its path relative to the fixed part of the glob that found it (or to the standard library),
with forward slashes. Order and the held-out split depend on names only, so a corpus may move from disk to
disk.
"""

import glob
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

from .errors import DataError

STDLIB = "stdlib"
SYNTHETIC = "synthetic"
HF = "hf:"

TEXT = (".txt", ".md", ".rst", ".py")
JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
COMPRESSED = (".gz", ".zst")

# Left out of the standard library: other people's packages, and tests, which some systems do not install and
# which hold files that are broken on purpose. What is left is 12 MB in 660 files on Python 3.11.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class File(NamedTuple):
    """One file of a corpus. kind: "text" (one document), "jsonl", "parquet" or "hf" (a document a record)."""

    path: str
    name: str
    kind: str


def find_files(source: str) -> list[File]:
    """The files that `source` ("stdlib", "hf:NAME", or a path or glob) names, sorted by name.

    Raises DataError where there are none, or where one is of a kind that cannot be read."""
    if source == STDLIB:
        return stdlib_files()
    if source.startswith(HF):
        return [File(source, source, "hf")]
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
    files = [File(path, Path(os.path.relpath(path, root or ".")).as_posix(), _kind(path)) for path in paths]
    return sorted(files, key=lambda file: file.name)


def stdlib_files() -> list[File]:
    """The .py files of the running Python's own library, without tests and installed packages, sorted by
    name."""
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        files += [File(str(path), path.relative_to(root).as_posix(), "text") for path in paths]
    if not files:
        raise DataError(f'data.source = "stdlib": this Python has no library source (.py files) under {root}')
    return sorted(files, key=lambda file: file.name)


def _fixed_part(pattern: str) -> str:
    """The folders of a glob before its first wildcard."""
    parts = pattern.split(os.sep)
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return os.sep.join(parts[:first]) or (os.sep if pattern.startswith(os.sep) else "")


def _kind(path: str) -> str:
    stem, ending = os.path.splitext(path)
    if ending in COMPRESSED:
        ending = os.path.splitext(stem)[1]
    for kind, endings in (("text", TEXT), ("jsonl", JSONL), ("parquet", PARQUET)):
        if ending in endings and not (kind == "parquet" and path.endswith(COMPRESSED)):
            return kind
    known = f"{' '.join(TEXT + JSONL)} (also with .gz or .zst after them) and {' '.join(PARQUET)}"
    raise DataError(f"data.source: {path} is of no kind that ftrain reads: {known}")
