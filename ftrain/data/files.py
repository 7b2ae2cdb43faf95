"""The bytes and lines of one file, decompressed, in pieces of a megabyte."""

import gzip
from collections.abc import Iterable, Iterator

from .errors import DataError

CHUNK = 1 << 20


def read_chunks(path: str) -> Iterator[bytes]:
    """A file's bytes, decompressed if its name ends in .gz or .zst. A compressed file cut short is an error."""
    if path.endswith(".zst"):
        yield from _zst_chunks(path)
        return
    with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as stream:
        while chunk := stream.read(CHUNK):
            yield chunk


def read_range(path: str, start: int, stop: int) -> Iterator[bytes]:
    """Bytes [start, stop) of a file, as they are."""
    with open(path, "rb") as stream:
        stream.seek(start)
        while start < stop and (chunk := stream.read(min(CHUNK, stop - start))):
            start += len(chunk)
            yield chunk


def line_starts(path: str, size: int, step: int) -> list[int]:
    """About every `step` bytes the offset of a line's start: 0 first, each once, all below the file's
    `size`."""
    starts = [0]
    with open(path, "rb") as stream:
        for offset in range(step, size, step):
            stream.seek(offset - 1)  # where the byte before ends a line, a line begins right here
            start = offset - 1 + len(stream.readline())
            if starts[-1] < start < size:
                starts.append(start)
    return starts


def read_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their line feed. Nothing else ends a line: U+2028, U+0085 and CR belong to the text."""
    pending: list[bytes] = []
    for chunk in chunks:
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*pending, line]) if pending else line
            pending = []
        if rest:
            pending.append(rest)
    if pending:
        yield b"".join(pending)


def count_lines(path: str, stop: int) -> int:
    """Line feeds in the first `stop` bytes of a file that is not compressed."""
    count = 0
    with open(path, "rb") as stream:
        while stop > 0 and (chunk := stream.read(min(CHUNK, stop))):
            count += chunk.count(b"\n")
            stop -= len(chunk)
    return count


def _zst_chunks(path: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path}: .zst needs zstandard: pip install 'ftrain[data]'") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame, pending = None, b""
    with open(path, "rb") as stream:
        while pending or (pending := stream.read(CHUNK)):
            # One object a frame: the library's stream reader takes a file cut in mid-frame for a short file.
            frame = frame or decompressor.decompressobj()
            try:
                yield frame.decompress(pending)
            except zstandard.ZstdError as error:
                raise DataError(f"{path}: not readable as zst: {error}") from error
            pending = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        raise DataError(f"{path}: cut short: its last zst frame has no end")
