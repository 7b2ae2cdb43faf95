"""The words of the report's page that page/report.js says too, of whichever rank is shown.

tests/test_report_html.py compares the two.
"""

from collections.abc import Sequence

from ftrain.sharding import MeshShape, Spec


def holds(rank: int, sizes: Sequence[int], spec: Spec, here: Sequence[slice]) -> str:
    """Which part of a parameter of `sizes` a rank holds: `here`, one slice a dim."""
    if any(part.start == part.stop for part in here):
        return f"rank {rank} holds nothing of it"
    parts = [
        f"{dim_name(dim)} {numbers(part.start, part.stop - 1)} of {n}"
        for dim, (n, axes, part) in enumerate(zip(sizes, spec.dims, here, strict=True))
        if axes
    ]
    return f"rank {rank} holds {', '.join(parts) or 'all of it'}"


def coordinates(mesh: MeshShape, rank: int) -> str:
    """The position of a rank on each axis of the mesh."""
    at = mesh.coordinate(rank)
    return ", ".join(f"{axis} {at[axis]}" for axis in mesh.axes) or "the only one"


def dim_name(dim: int) -> str:
    """The name of a tensor dim: rows, columns, dim 2."""
    return ("rows", "columns")[dim] if dim < 2 else f"dim {dim}"


def numbers(first: int, last: int) -> str:
    """A range, both ends in it."""
    return str(first) if first == last else f"{first}–{last}"


def rank_count(n: int) -> str:
    """ "1 rank", "8 ranks"."""
    return count(n, "rank")


def count(n: int, what: str, s: str = "s", plural: str | None = None) -> str:
    """A number and what it counts, in the plural where it is not 1. s: what the plural adds; plural: the whole word."""
    return f"{n} {what}" if n == 1 else f"{n} {plural or what + s}"


def short_number(number: int) -> str:
    """Four digits and a letter: 3.287M, 405.9B."""
    unit, letter = next(((10**n, letter) for n, letter in ((9, "B"), (6, "M"), (3, "k")) if number >= 10**n), (1, ""))
    return f"{number / unit:.4g}{letter}"
