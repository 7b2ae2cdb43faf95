"""Tokens on disk: one file a unit of work, named by a hash of what is in it.

The name (the unit's *key*) hashes the text, the names of its files, the tokenizer and how documents are
split, so a file is never stale and never changes; corpora that share text share files. A file is written
under another name and renamed when it is whole: an interrupted run leaves what it finished, and two runs at
once at worst do the same work twice.
"""

import contextlib
import fcntl
import json
import mmap
import os
import struct
import time
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np

from .errors import DataError
from .files import CHUNK, read_range
from .sources import Slice, Unit

MAGIC = b"ftrain01"
HEADER = struct.Struct("<8sqqqq")  # magic, bytes a token, training tokens, held-out tokens, documents
DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<i4")}
SETTLED_NS = 2_000_000_000  # a file changed this recently may change again without its times showing it
STALE_S = 24 * 3600
HOST = os.uname().nodename  # a cache may be shared by machines, and process numbers are not theirs


class Part(NamedTuple):
    """The tokens of a unit: training and held-out documents apart."""

    train: tuple[np.ndarray, ...]
    held: tuple[np.ndarray, ...]
    n_documents: int


def default_folder() -> Path:
    """ftrain's folder in the user's cache: $XDG_CACHE_HOME/ftrain, or ~/.cache/ftrain."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ftrain"


def unit_key(unit: Unit, settings: tuple, folder: Path) -> str:
    """The key of a unit under `settings` (anything whose repr says what else decides the tokens).

    Reads all of the text the first time; then the files' sizes and times tell that they are the same."""
    seen = folder / "seen" / _hash(settings, [_identity(slice_) for slice_ in unit])
    with contextlib.suppress(OSError):
        return seen.read_text()
    places = [(slice_.name, slice_.kind, slice_.start, slice_.stop) for slice_ in unit]
    key = _hash(settings, places, [_digest(slice_) for slice_ in unit])
    now = time.time_ns()
    if all(now - _changed_ns(slice_) > SETTLED_NS for slice_ in unit):
        with writing(seen) as temporary:
            temporary.write_text(key)
    return key


def tokenizer_path(folder: Path, units: Iterable[Unit], settings: tuple) -> Path:
    """Where the tokenizer trained on the text of `units` under `settings` is kept."""
    keys = [unit_key(unit, ("tokenizer",), folder) for unit in units]
    return folder / "tokenizers" / f"{_hash(settings, keys)}.json"


def part_path(folder: Path, key: str) -> Path:
    """Where the part with this key lies: a folder for each first two digits, as no folder should hold thousands."""
    return folder / "tokens" / key[:2] / f"{key}.tokens"


def read_part(path: Path) -> Part | None:
    """The part mapped into memory; None where there is none, or one that is not whole."""
    try:
        with open(path, "rb") as file:
            magic, width, n_train, n_held, n_documents = HEADER.unpack(file.read(HEADER.size))
            size = HEADER.size + width * (n_train + n_held)
            if magic != MAGIC or width not in DTYPES or os.fstat(file.fileno()).st_size != size:
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, struct.error):  # writing it anew says what is wrong with the folder
        return None
    tokens = np.frombuffer(mapped, DTYPES[width], n_train + n_held, HEADER.size)
    return Part((tokens[:n_train],), (tokens[n_train:],), n_documents)


def write_part(path: Path, batches: Iterable[tuple[np.ndarray, np.ndarray, int]], dtype: np.dtype) -> None:
    """Write a part from batches of (training tokens, held-out tokens, documents), never holding more than one."""
    n_train = n_held = n_documents = 0
    with writing(path) as temporary, open(temporary, "w+b") as file, TemporaryFile(dir=path.parent) as held:
        file.write(bytes(HEADER.size))
        for train_tokens, held_tokens, documents in batches:
            file.write(train_tokens.astype(dtype, copy=False).data)
            held.write(held_tokens.astype(dtype, copy=False).data)
            n_train, n_held = n_train + len(train_tokens), n_held + len(held_tokens)
            n_documents += documents
        held.seek(0)
        while chunk := held.read(CHUNK):
            file.write(chunk)
        file.seek(0)
        file.write(HEADER.pack(MAGIC, dtype.itemsize, n_train, n_held, n_documents))
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A name to write under; renamed to `path` at the end, removed on an error. DataError if the disk refuses."""
    temporary = path.with_name(f"{path.name}.{HOST}-{os.getpid()}.{time.time_ns()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock `name`: one process at a time, freed however the holder ends.

    Saves work and is not needed for the files' sake: where a file system has no locks, all go ahead."""
    path = folder / "locks" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")
    except OSError as error:
        raise _cannot_write(path, error) from error
    with file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_unfinished(folder: Path, pids: tuple[int, ...] = ()) -> None:
    """Remove what was left half-written: by runs that ended over a day ago, and by our own ended processes."""
    for path in folder.glob("*/**/*.tmp"):
        with contextlib.suppress(OSError):
            ours = any(f".{HOST}-{pid}." in path.name for pid in pids)
            if ours or time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot write {path}: {error} (data.cache names the folder of tokens)")


def _identity(slice_: Slice) -> tuple:
    if slice_.kind == "hf":
        return tuple(slice_)
    stat = os.stat(slice_.path)
    place = (os.path.abspath(slice_.path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return (*place, slice_.name, slice_.kind, slice_.start, slice_.stop)


def _changed_ns(slice_: Slice) -> int:
    if slice_.kind == "hf":
        return 0
    stat = os.stat(slice_.path)
    return max(stat.st_mtime_ns, stat.st_ctime_ns)


def _digest(slice_: Slice) -> str:
    """A hash of the slice's bytes as stored (of the whole file for row groups)."""
    if slice_.kind == "hf":
        return slice_.version
    start, stop = 0, os.path.getsize(slice_.path)
    if slice_.kind == "jsonl" and slice_.stop is not None:
        start, stop = slice_.start, slice_.stop
    digest = blake2b(digest_size=16)
    try:
        for chunk in read_range(slice_.path, start, stop):
            digest.update(chunk)
    except OSError as error:
        raise DataError(f"{slice_.path}: cannot be read: {error}") from error
    return digest.hexdigest()


def _hash(*what: object) -> str:
    text = json.dumps(what, default=str)
    return blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()
