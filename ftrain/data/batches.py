"""A batch is a function of (seed, step). There is no iterator, so there is no iterator state to save or to
lose.

Step s takes the sequence numbers s*B ... s*B + B - 1. Number g is position g % n of epoch g // n, and an
epoch is the n windows in an order drawn from (seed, epoch): each window once an epoch, a new order every
epoch, and a batch that does not fit in what is left of an epoch goes on in the next.
"""

from dataclasses import dataclass

import numpy as np
import torch

from . import shuffle
from .errors import DataError
from .packing import IGNORE, Stream, n_windows, read_window


@dataclass(frozen=True)
class Train:
    """Training windows in shuffled order."""

    stream: Stream
    seq_len: int
    global_batch_size: int
    seed: int
    vocab_size: int

    @property
    def n_tokens(self) -> int:
        return self.stream.n_tokens

    @property
    def n_windows(self) -> int:
        return n_windows(self.stream, self.seq_len)

    def ids(self, step: int) -> list[int]:
        """The windows of step `step` (from 0), one a row, in row order."""
        assert step >= 0, f"step {step}"
        number = np.arange(step * self.global_batch_size, (step + 1) * self.global_batch_size)
        epochs, positions = np.divmod(number, self.n_windows)
        ids = np.empty_like(number)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ids[here] = shuffle.permute(positions[here], self.n_windows, shuffle.key(self.seed, int(epoch)))
        return ids.tolist()

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        """Rows `rows` of the global batch of step `step` (from 0); only they are read.

        {"tokens", "targets"}: int64 (rows, seq_len); targets of IGNORE do not count."""
        return _read(self.stream, self.ids(step)[rows], self.seq_len, self.vocab_size)


@dataclass(frozen=True)
class Validation:
    """Held-out windows in their order; together their targets are every held-out token but the first,
    once."""

    stream: Stream
    seq_len: int
    vocab_size: int

    @property
    def n_tokens(self) -> int:
        return self.stream.n_tokens

    @property
    def n_windows(self) -> int:
        return n_windows(self.stream, self.seq_len)

    def batch(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Windows [start, stop), as Train.batch gives them; fewer where there are fewer."""
        return _read(self.stream, range(start, min(stop, self.n_windows)), self.seq_len, self.vocab_size)


def _read(stream: Stream, ids, seq_len: int, vocab_size: int) -> dict[str, torch.Tensor]:
    tokens = np.zeros((len(ids), seq_len), np.int64)
    targets = np.full((len(ids), seq_len), IGNORE, np.int64)
    for row, window in enumerate(ids):
        tokens[row], targets[row] = read_window(stream, window, seq_len)
    for name, array in (("token", tokens), ("target", targets)):
        if array.size and array.max() >= vocab_size:
            row, column = np.argwhere(array >= vocab_size)[0]
            raise DataError(
                f"data: {name} {column} of window {ids[row]} has id {array[row, column]}, "
                f"outside the model's vocabulary of {vocab_size}"
            )
    return {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}
