"""Bytes on disk: a raw file per rank, and a JSON index that says what lies where. No pickle, nothing to run.

`rank-00000.bin` holds the pieces (chunks) of tensors that this rank wrote, one after the other, each at a
multiple of 64 bytes. `index.json` maps every leaf to its dtype, shape and chunks, each with file, start and
crc32.
A reader trusts neither: names, dtypes, bounds and coverage are checked before a byte is used.
"""

import contextlib
import json
import math
import os
import re
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

INDEX = "index.json"
ALIGN = 64
PIECE = 1 << 24  # bytes hashed and written at a time
BEGIN = 1 << 23  # bytes after which the disk is to begin
DATA_FILE = re.compile(r"rank-\d{5,}\.bin")

_DTYPE_NAMES = """bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"""
DTYPES = {name: getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name)}
SCALARS = {"int": int, "float": float, "bool": bool}


class Chunk(NamedTuple):
    """A box of one tensor: where it lies in the tensor, and where its bytes (row-major) lie on disk."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    crc: int


class Leaf(NamedTuple):
    """A stored tensor: dtype, full shape, and chunks that tile it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def data_file(rank: int) -> str:
    """The name of the file that `rank` writes."""
    return f"rank-{rank:05d}.bin"


def write_chunks(path: Path, chunks: Iterable[tuple[Any, torch.Tensor]]) -> dict[Any, tuple[int, int]]:
    """Write (key, tensor) pairs into a new file, to be synced. Returns key -> (start in bytes, crc32)."""
    places, begun = {}, 0
    with open(path, "xb", buffering=1 << 20) as file:
        for key, tensor in chunks:
            file.write(bytes(-file.tell() % ALIGN))
            start, crc = file.tell(), 0
            view = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for at in range(0, len(view), PIECE):
                piece = view[at : at + PIECE]
                crc = zlib.crc32(piece, crc)
                file.write(piece)
            places[key] = (start, crc)
            if file.tell() - begun >= BEGIN and hasattr(os, "posix_fadvise"):
                # "Not needed in memory": the disk begins with these bytes while we prepare more, and `sync` finds
                # most of its work done.
                os.posix_fadvise(file.fileno(), begun, file.tell() - begun, os.POSIX_FADV_DONTNEED)
                begun = file.tell()
    return places


def read_chunk(folder: Path, name: str, dtype: torch.dtype, chunk: Chunk) -> torch.Tensor:
    """Read one chunk as a CPU tensor. Raises ValueError if the bytes are not those that were written."""
    data = torch.empty(math.prod(chunk.sizes) * dtype.itemsize, dtype=torch.uint8)
    view = data.numpy().data
    with open(folder / chunk.file, "rb", buffering=0) as file:
        file.seek(chunk.start)
        while view and (n := file.readinto(view)):
            view = view[n:]
    if view or zlib.crc32(data.numpy().data) != chunk.crc:
        raise ValueError(f"the bytes of {name} in {chunk.file} are damaged (wrong checksum)")
    return data.view(dtype).view(chunk.sizes)


def write_text(path: Path, text: str) -> tuple[int, int]:
    """Write a new text file, which `sync` has still to make durable. Returns its size in bytes and its crc32."""
    data = text.encode()
    with open(path, "xb") as file:
        file.write(data)
    return len(data), zlib.crc32(data)


def sync(*paths: Path) -> None:
    """Make files, and the names in folders (files created, folders renamed), survive a power cut.

    All at once: a disk that has to commit its journal for each commits it once for all.
    """
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(len(paths)) as pool:
        handles = [os.open(path, os.O_RDONLY) for path in paths]
        for handle in handles:
            opened.callback(os.close, handle)
        list(pool.map(os.fsync, handles))


def encode_index(leaves: dict[str, Leaf], scalars: dict[str, int | float | bool]) -> str:
    """The text of index.json."""
    tensors = {
        name: {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": leaf.shape, "chunks": leaf.chunks}
        for name, leaf in leaves.items()
    }
    values = {name: [type(value).__name__, value] for name, value in scalars.items()}
    return json.dumps({"tensors": tensors, "scalars": values}, separators=(",", ":"))


def decode_index(text: str, files: dict[str, int]) -> tuple[dict[str, Leaf], dict[str, int | float | bool]]:
    """The inverse of `encode_index`. `files` gives the size in bytes of each file that chunks may lie in.

    Raises ValueError, naming the leaf, for an unknown dtype, a chunk outside its file or its tensor, or
    chunks that do not tile the tensor: nothing is left to chance by what is read.
    """
    raw = json.loads(text)
    leaves: dict[str, Leaf] = {}
    for name, entry in raw["tensors"].items():
        try:
            chunks = tuple(Chunk(tuple(o), tuple(s), *rest) for o, s, *rest in entry["chunks"])
            leaf = Leaf(DTYPES[entry["dtype"]], tuple(entry["shape"]), chunks)
            _check_leaf(leaf, files)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"its index has a wrong entry for {name}: {error}") from error
        leaves[name] = leaf
    scalars: dict[str, Any] = {}
    for name, (kind, value) in raw["scalars"].items():
        if type(value) is not SCALARS.get(kind):
            raise ValueError(f"its index has a wrong entry for {name}: {value!r} is not a {kind}")
        scalars[name] = value
    return leaves, scalars


def _check_leaf(leaf: Leaf, files: dict[str, int]) -> None:
    for chunk in leaf.chunks:
        numbers = (*leaf.shape, *chunk.offsets, *chunk.sizes, chunk.start, chunk.crc)
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError("sizes and offsets must be integers from 0 up")
        if chunk.file not in files or not DATA_FILE.fullmatch(chunk.file):
            raise ValueError(f"{chunk.file!r} is not one of its data files")
        if chunk.start + math.prod(chunk.sizes) * leaf.dtype.itemsize > files[chunk.file]:
            raise ValueError(f"a chunk ends after the end of {chunk.file}")
        if not len(leaf.shape) == len(chunk.offsets) == len(chunk.sizes):
            raise ValueError(f"a chunk of sizes {chunk.sizes} in a tensor of shape {leaf.shape}")
        if any(o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, leaf.shape, strict=True)):
            raise ValueError(f"a chunk reaches outside the shape {leaf.shape}")
    full = [chunk for chunk in leaf.chunks if math.prod(chunk.sizes)]
    if sum(math.prod(chunk.sizes) for chunk in full) != math.prod(leaf.shape) or _overlap(full):
        raise ValueError(f"its chunks do not cover the shape {leaf.shape} exactly once")


def _overlap(chunks: list[Chunk]) -> bool:
    """Whether two of these non-empty boxes share an element: a sweep along the dim with the most cuts."""
    if len(chunks) < 2:
        return False
    if not chunks[0].sizes:
        return True
    dim = max(range(len(chunks[0].sizes)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    open_: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: c.offsets[dim]):
        open_ = [other for other in open_ if other.offsets[dim] + other.sizes[dim] > chunk.offsets[dim]]
        if any(_boxes_meet(chunk, other) for other in open_):
            return True
        open_.append(chunk)
    return False


def _boxes_meet(a: Chunk, b: Chunk) -> bool:
    return all(
        ao < bo + bs and bo < ao + as_ for ao, as_, bo, bs in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
