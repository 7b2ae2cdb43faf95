"""One long stream of tokens, read in windows.

Documents follow one another, each between its BOS and EOS. Window w is tokens [w*S, w*S + S + 1): its first S
are the input, its last S the targets, so every token but the stream's first is a target exactly once. The
last window may be short: it is padded, and the padding's targets do not count.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from . import shuffle
from .errors import DataError

IGNORE = -100  # nn.IGNORE, again: the processes that tokenise import this package and start without torch


class Stream(Protocol):
    """Tokens by position."""

    @property
    def n_tokens(self) -> int:
        """How many there are."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), 0 <= start <= stop <= n_tokens, as int64."""


class Parts(NamedTuple):
    """A stream that lies in several arrays (in memory or mapped), read as if they were one."""

    arrays: tuple[np.ndarray, ...]
    starts: np.ndarray  # (len(arrays) + 1,) int64: where each array begins, and the end

    @property
    def n_tokens(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
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


def split_tail(train: Stream, held: Stream, share: float, seq_len: int) -> tuple[Stream, Stream]:
    """(training, held-out) streams. Where too few documents were held out for a window, the last `share` of
    the training windows are, if that is one at least: so a corpus of one document has held-out text too."""
    windows = n_windows(train, seq_len)
    tail = int(share * windows)
    if held.n_tokens >= 2 or tail == 0:
        return train, held
    cut = (windows - tail) * seq_len + 1
    return Span(train, 0, cut), Span(train, cut, train.n_tokens - cut)


class Windows(NamedTuple):
    """The windows of some streams, numbered through: all of the first stream's, then the second's, and so on.

    vocab_size: of the model. boundary: (BOS, EOS) if batches shall carry "segments", else None."""

    streams: tuple[Stream, ...]
    seq_len: int
    vocab_size: int
    boundary: tuple[int, int] | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens of all streams."""
        return sum(stream.n_tokens for stream in self.streams)

    @property
    def n_windows(self) -> int:
        """Windows of all streams."""
        return int(self.starts[-1])

    @property
    def starts(self) -> np.ndarray:
        """(streams + 1,) int64: the number of each stream's first window, and the number of windows."""
        counts = [n_windows(stream, self.seq_len) for stream in self.streams]
        return np.cumsum([0, *counts], dtype=np.int64)

    def read(self, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """The windows of these numbers as rows: "tokens" and "targets" (and "segments"), int64 (rows, seq_len).

        Padding has token 0 and target IGNORE. Segments number the documents of a row; padding is one of its
        own. Raises DataError for an id that the model does not have."""
        shape = (len(ids), self.seq_len)
        batch = {"tokens": np.zeros(shape, np.int64), "targets": np.full(shape, IGNORE, np.int64)}
        if self.boundary:
            batch["segments"] = np.zeros(shape, np.int64)
        starts = self.starts
        for row, window in enumerate(ids):
            which = int(np.searchsorted(starts, window, side="right")) - 1
            stream, start = self.streams[which], (window - int(starts[which])) * self.seq_len
            read = stream.read(start, min(start + self.seq_len + 1, stream.n_tokens))
            if len(read) and read.max() >= self.vocab_size:
                self._refuse(window, read)
            n = len(read) - 1
            batch["tokens"][row, :n], batch["targets"][row, :n] = read[:-1], read[1:]
            if self.boundary:
                before = stream.read(start - 1, start) if start else np.array([self.boundary[1]])
                batch["segments"][row, :n] = segments(np.concatenate([before, read[:-1]]), *self.boundary)
                batch["segments"][row, n:] = batch["segments"][row, n - 1] + 1
        return batch

    def _refuse(self, window: int, read: np.ndarray) -> None:
        place = int(np.argmax(read >= self.vocab_size))
        raise DataError(
            f"data: token {place} of window {window} has id {read[place]}, outside the model's vocabulary of "
            f"{self.vocab_size} (model.vocab_size)"
        )


def segments(tokens: np.ndarray, bos: int, eos: int) -> np.ndarray:
    """The document of tokens[1:], counted within them. tokens[0] is only what comes before.

    A document begins at a BOS that follows an EOS. Where both are one id that still holds: no document is
    empty and no document's text holds the id, so the id comes in pairs, the second of which begins a document."""
    return np.cumsum((tokens[1:] == bos) & (tokens[:-1] == eos))
