"""One long stream of tokens, read in windows.

Documents follow one another, each between its BOS and EOS. Window w is tokens [w*S, w*S + S + 1): its first S
are the input, its last S the targets, so every token but the stream's first is a target exactly once. The
last window may be short: it is padded, and the padding's targets do not count.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from . import shuffle

IGNORE = -100


class Stream(Protocol):
    """Tokens by position."""

    n_tokens: int

    def read(self, start: int, stop: int) -> np.ndarray: ...


class Parts(NamedTuple):
    """A stream that lies in several arrays (in memory or mapped), read as if they were one."""

    arrays: tuple[np.ndarray, ...]
    starts: np.ndarray  # (len(arrays) + 1,) int64: where each array begins, and the end

    @property
    def n_tokens(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as int64."""
        part = int(np.searchsorted(self.starts, start, side="right")) - 1
        pieces = []
        while start < stop:
            begin, end = int(self.starts[part]), int(self.starts[part + 1])
            pieces.append(self.arrays[part][start - begin : min(stop, end) - begin])
            start, part = min(stop, end), part + 1
        if len(pieces) == 1:
            return pieces[0].astype(np.int64)
        return np.concatenate(pieces or [np.zeros(0)], dtype=np.int64, casting="unsafe")


def parts(arrays: Sequence[np.ndarray]) -> Parts:
    """A stream over arrays of any integer dtype, one after the other."""
    kept = tuple(array for array in arrays if len(array))
    return Parts(kept, np.cumsum([0] + [len(array) for array in kept], dtype=np.int64))


class Span(NamedTuple):
    """Tokens [start, start + n_tokens) of another stream."""

    stream: Stream
    start: int
    n_tokens: int

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.stream.read(self.start + start, self.start + stop)


class Random(NamedTuple):
    """Uniform random tokens: token p is a hash of (seed, p), so nothing is stored."""

    seed: int
    vocab_size: int
    n_tokens: int

    def read(self, start: int, stop: int) -> np.ndarray:
        position = np.arange(start, stop, dtype=np.uint64) + np.uint64(shuffle.key(self.seed))
        return (shuffle.mix(position * shuffle.GAMMA) % np.uint64(self.vocab_size)).astype(np.int64)


def n_windows(stream: Stream, seq_len: int) -> int:
    """How many windows of seq_len targets cover the stream, a short last one included."""
    return max(0, -(-(stream.n_tokens - 1) // seq_len))


def read_window(stream: Stream, window: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, targets) of one window: int64, each (seq_len,). Padding has token 0 and target IGNORE."""
    start = window * seq_len
    read = stream.read(start, min(start + seq_len + 1, stream.n_tokens))
    tokens, targets = np.zeros(seq_len, np.int64), np.full(seq_len, IGNORE, np.int64)
    tokens[: len(read) - 1], targets[: len(read) - 1] = read[:-1], read[1:]
    return tokens, targets
