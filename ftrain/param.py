"""One declaration per parameter, and initial values that depend on nothing but the seed and the path.

A model's `abstract(cfg)` is a tree of `Param`. Initialisation, sharding, the checkpoint's schema and the sharding
report all follow from it, and none of them needs a device to be planned.
"""

import hashlib
import math
from dataclasses import dataclass

import torch

# Values are drawn in blocks of whole rows, each from a generator of its own, so that a rank can make its rows of a
# large matrix without making the others. The size trades a generator's start (microseconds) against rows drawn
# only to be thrown away; changing it changes every initial value.
BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Init:
    """How a parameter starts: "normal" with standard deviation `std`, "ones" or "zeros"."""

    kind: str
    std: float = 0.0


def normal(std: float) -> Init:
    """Normal values of mean 0 and standard deviation `std`."""
    return Init("normal", std)


ONES = Init("ones")
ZEROS = Init("zeros")


@dataclass(frozen=True)
class Param:
    """A parameter before it exists: shape, one logical axis name per dim, initialiser, and storage dtype."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"a parameter of shape {self.shape} needs one axis name per dim, got {self.axes}")

    @property
    def numel(self) -> int:
        """How many elements the whole parameter has."""
        return math.prod(self.shape)


def initial_rows(path: str, param: Param, seed: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Rows [start, stop) of the initial value of `param`, on the CPU, in its dtype.

    Bitwise the same rows whatever the range asked for, so every sharding starts from the same parameters. Raises
    ValueError for an initialiser that there is not.
    """
    stop = param.shape[0] if stop is None else stop
    shape = (max(stop - start, 0), *param.shape[1:])
    if param.init.kind == "ones":
        return torch.ones(shape, dtype=param.dtype)
    if param.init.kind == "zeros":
        return torch.zeros(shape, dtype=param.dtype)
    if param.init.kind != "normal":
        raise ValueError(f"{path}: the initialiser {param.init.kind!r} is not one of normal, ones, zeros")
    row = param.numel // max(param.shape[0], 1)
    height = max(1, BLOCK_ELEMENTS // max(row, 1))
    out = torch.empty(shape, dtype=param.dtype)
    for block in range(start // height, -(-stop // height)):
        first, last = block * height, min((block + 1) * height, param.shape[0])
        values = torch.empty((height, *param.shape[1:]), dtype=torch.float32)
        values.normal_(0.0, param.init.std, generator=_generator(seed, path, block))
        a, b = max(first, start), min(last, stop)
        out[a - start : b - start] = values[a - first : b - first]
    return out


def _generator(seed: int, path: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{path}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
