"""A batch is a function of (seed, step): there is no iterator, so no iterator state to save or to lose.

Step s takes the sequence numbers s*B ... s*B + B - 1. Number g is position g % n of epoch g // n, and an
epoch is the n windows in an order drawn from (seed, epoch): each window once an epoch, a new order every
epoch, and a batch that does not fit in what is left of an epoch goes on in the next.

With weights, numbers are first dealt out to the sources: of every 1024 each source gets its share, in an
order drawn from (seed, block). Each source then has its own count of numbers, and its own epochs.
"""

from dataclasses import dataclass

import numpy as np

from . import shuffle
from .packing import Windows

BLOCK = 1024
VALIDATION_SEED = 0


@dataclass(frozen=True)
class Train:
    """Training windows in shuffled order. weights: one a stream, or () for one epoch over all of them."""

    windows: Windows
    weights: tuple[float, ...]
    global_batch_size: int
    seed: int

    def ids(self, step: int) -> list[int]:
        """The windows of step `step` (from 0), one a row, in row order."""
        assert step >= 0, f"step {step}"
        numbers = np.arange(step * self.global_batch_size, (step + 1) * self.global_batch_size)
        if not self.weights:
            return shuffled(numbers, self.windows.n_windows, self.seed).tolist()
        starts = self.windows.starts
        sources, numbers = dealt(numbers, self.weights, self.seed)
        ids = np.empty_like(numbers)
        for source in np.unique(sources):
            here, n = sources == source, int(starts[source + 1] - starts[source])
            ids[here] = starts[source] + shuffled(numbers[here], n, self.seed, int(source))
        return ids.tolist()

    def batch(self, step: int, rows: slice = slice(None)) -> dict:
        """Rows `rows` of the global batch of step `step` (from 0); only they are read.

        "tokens", "targets", and "segments" with data.document_mask: int64 tensors (rows, seq_len); targets of
        IGNORE do not count, and a token attends to those of its own segment.
        """
        return _tensors(self.windows.read(self.ids(step)[rows]))


@dataclass(frozen=True)
class Validation:
    """Held-out windows in one fixed order, the same for every seed.

    Together their targets are every held-out token (but each source's first) once. The order is a shuffle, so
    that the first few windows are a fair sample of the documents.
    """

    windows: Windows

    def batch(self, start: int, stop: int) -> dict:
        """Places [start, stop) of the order, as Train.batch gives them; fewer where there are fewer."""
        return _tensors(self.windows.read(self.ids(start, stop)))

    def ids(self, start: int, stop: int) -> list[int]:
        """The windows at places [start, stop) of the order."""
        places = np.arange(start, max(start, min(stop, self.windows.n_windows)))
        return shuffled(places, max(1, self.windows.n_windows), VALIDATION_SEED).tolist()


def shuffled(numbers: np.ndarray, n: int, seed: int, *salt: int) -> np.ndarray:
    """The window of each sequence number, in epochs over n windows. int64 in and out."""
    epochs, positions = np.divmod(numbers, n)
    ids = np.empty_like(numbers)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        ids[here] = shuffle.permute(positions[here], n, shuffle.key(seed, int(epoch), *salt))
    return ids


def dealt(numbers: np.ndarray, weights: tuple[float, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which source each sequence number draws from, and which of that source's draws it is (from 0)."""
    quotas = np.array(shares(weights))
    ends = np.cumsum(quotas)
    sources, draws = np.empty_like(numbers), np.empty_like(numbers)
    blocks, places = np.divmod(numbers, BLOCK)
    for block in np.unique(blocks):
        here = blocks == block
        deal = shuffle.permute(np.arange(BLOCK), BLOCK, shuffle.key(seed, int(block), len(weights)))
        source_of = np.searchsorted(ends, deal, side="right")
        for source, quota in enumerate(quotas):
            mine = here & (source_of[places] == source)
            sources[mine] = source
            draws[mine] = block * quota + np.cumsum(source_of == source)[places[mine]] - 1
    return sources, draws


def shares(weights: tuple[float, ...]) -> list[int]:
    """How many of BLOCK sequences each source gets: its share rounded, at least one, BLOCK in all."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) != BLOCK:
        step = 1 if sum(counts) < BLOCK else -1
        open_ = [i for i, count in enumerate(counts) if count + step >= 1]
        counts[max(open_, key=lambda i: step * (exact[i] - counts[i]))] += step
    return counts


def _tensors(arrays: dict[str, np.ndarray]) -> dict:
    import torch  # here, so that the processes that tokenise start without it

    return {name: torch.from_numpy(array) for name, array in arrays.items()}
