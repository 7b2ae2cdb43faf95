"""The .safetensors files of a checkpoint: where each tensor lies, a slice of one, and new files written piece by piece.

The format (https://github.com/huggingface/safetensors) is eight bytes of length, a header in JSON and raw bytes. The
safetensors package reads it; it writes whole files only, all tensors of one in memory, and so is not used for that.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ftrain.hf.config import HfError

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX = 1 << 28
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def find_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor that the index names, or that the one file holds. Reads headers only.

    Other files are passed over. Raises HfError for a file that is missing or cut short, and for a tensor that is not
    in the file that the index names, or not of floating-point numbers.
    """
    if (folder / INDEX).is_file():
        files: dict[str, list[str]] = {}
        for name, file in _read_index(folder / INDEX).items():
            files.setdefault(file, []).append(name)
        for file in sorted(files):
            if not (folder / file).is_file():
                raise HfError(f"{folder / INDEX} names {file}, and there is no such file")
    elif (folder / ONE_FILE).is_file():
        files = {ONE_FILE: []}
    else:
        there = ", ".join(sorted(path.name for path in folder.glob("*.safetensors"))[:4])
        raise HfError(
            f"{folder} has neither {ONE_FILE} nor {INDEX}" + (f", which would say what is in {there}" if there else "")
        )
    tensors = {}
    for file, names in files.items():
        with _opened(folder / file) as opened:
            held = set(opened.keys())
            for name in names or sorted(held):
                if name not in held:
                    raise HfError(f"{folder / INDEX} says that {name} is in {file}, and it is not")
                part = opened.get_slice(name)
                tensors[name] = Stored(folder / file, tuple(part.get_shape()), _dtype(name, part, folder / file))
    return tensors


def read_slices(name: str, stored: Stored, slices: Sequence[slice]) -> torch.Tensor:
    """A part of a tensor, on the CPU, in memory of its own. Nothing else of the file is read."""
    sizes = [s.stop - s.start for s in slices]
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=stored.dtype)
    # The file is mapped, not read, and the slice is a view of it. Opened anew for each tensor, so that what was mapped
    # for the last one is given back: a process would otherwise seem to hold whole files.
    with _opened(stored.file) as opened:
        return opened.get_slice(name)[tuple(slices)].clone(memory_format=torch.contiguous_format)


class ToWrite(NamedTuple):
    """A tensor before it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def cut(tensors: Iterable[ToWrite], most: int) -> dict[str, list[ToWrite]]:
    """The files for these tensors, in order, each of at most `most` bytes of values, or of one tensor."""
    parts: list[list[ToWrite]] = [[]]
    for tensor in tensors:
        if parts[-1] and sum(t.nbytes for t in parts[-1]) + tensor.nbytes > most:
            parts.append([])
        parts[-1].append(tensor)
    if len(parts) == 1:
        return {ONE_FILE: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def index(files: dict[str, list[ToWrite]]) -> dict[str, Any]:
    """The index of several files."""
    return {
        "metadata": {"total_size": sum(tensor.nbytes for part in files.values() for tensor in part)},
        "weight_map": {tensor.name: file for file, part in files.items() for tensor in part},
    }


def write_file(path: Path, tensors: Sequence[ToWrite], values: Iterable[torch.Tensor]) -> None:
    """Write a new .safetensors file. The values, on any device, are taken and written one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        place = [at, at + tensor.nbytes]
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, value in zip(tensors, values, strict=True):
            assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype), f"{tensor}: {value.shape}"
            view = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            while view:  # one call writes at most 2 GiB
                view = view[file.write(view) :]


def _read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > MAX_INDEX:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        places = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(places, dict) or not places:
            raise ValueError("its weight_map names no tensor")
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise HfError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise HfError(f"{path} says that {name} is in {json.dumps(file)}: expected a .safetensors file beside it")
    return places


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise HfError("checkpoints of Hugging Face need safetensors: pip install 'ftrain[hf]'") from None
    try:
        with safe_open(path, "pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise HfError(f"{path} cannot be read: is it cut short? ({error})") from error


def _dtype(name: str, part: Any, path: Path) -> torch.dtype:
    kind = part.get_dtype()
    if kind not in DTYPES:
        raise HfError(f"{path}: {name} has dtype {kind}; ftrain reads {', '.join(DTYPES)}")
    return DTYPES[kind]
