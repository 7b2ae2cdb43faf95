"""Files -> documents, streaming: a file is never held whole unless it is one document.

Empty documents are left out (they would be boundaries and nothing else); one of only white space is kept.
"""

import json
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

from .errors import DataError
from .files import count_lines, read_chunks, read_lines, read_range
from .hub import load_hf
from .parquet import read_rows
from .sources import Slice

BOM = b"\xef\xbb\xbf"


class Origin(NamedTuple):
    """Where a document came from; str() says it for a person."""

    path: str
    what: str = ""  # "line", "row", or "" for a file that is one document
    number: int = 0  # from 1, counted from byte `start` of the file
    start: int = 0

    def __str__(self) -> str:
        if not self.what:
            return self.path
        # A slice in the middle of a file does not know how many lines precede it, and only an error needs to.
        before = count_lines(self.path, self.start) if self.start else 0
        return f"{self.path}, {self.what} {before + self.number}"


class Document(NamedTuple):
    """A text, where it came from, and the key that decides whether it is held out."""

    text: str
    origin: Origin
    key: str


def read_documents(slice_: Slice, field: str = "text") -> Iterator[Document]:
    """The documents of a slice of a file, in order. field: the JSON key or column that holds the text.

    Raises DataError naming the file and its line (row) where something cannot be read."""
    try:
        for document in READERS[slice_.kind](slice_, field):
            if document.text:
                yield document
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{slice_.path}: cannot be read: {error}") from error


def is_held_out(key: str, share: float) -> bool:
    """Whether the document of this key is held out: its hash is in the lowest `share` of all hashes.

    Depends on nothing else, so adding documents moves none from one side to the other."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") < share * 2**64


def _read_text(slice_: Slice, field: str) -> Iterator[Document]:
    data = b"".join(read_chunks(slice_.path)).removeprefix(BOM)
    yield Document(_decode_text(data, slice_.path), Origin(slice_.path), slice_.name)


def _read_jsonl(slice_: Slice, field: str) -> Iterator[Document]:
    path, start = slice_.path, slice_.start
    chunks = read_chunks(path) if slice_.stop is None else read_range(path, start, slice_.stop)
    offset = start
    for number, line in enumerate(read_lines(chunks), start=1):
        here, offset = offset, offset + len(line) + 1
        if number == 1 and start == 0:
            line = line.removeprefix(BOM)
        if not line.strip():
            continue
        origin = Origin(path, "line", number, start)
        try:
            record = json.loads(_decode_line(line, origin))
        except json.JSONDecodeError as error:
            raise DataError(f"{origin}: not a JSON value: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise DataError(f"{origin}: the JSON value is nested too deeply") from None
        yield Document(_text_of(record, field, origin), origin, f"{slice_.name}:{here}")


def _read_parquet(slice_: Slice, field: str) -> Iterator[Document]:
    for row, value in read_rows(slice_.path, field, slice_.start, slice_.stop):
        origin = Origin(slice_.path, "row", row)
        yield Document(_text_of({field: value}, field, origin), origin, f"{slice_.name}:{row}")


def _read_hf(slice_: Slice, field: str) -> Iterator[Document]:
    rows = load_hf(slice_.path)
    if slice_.stop is not None:
        rows = rows.shard(rows.num_shards, slice_.start)
    for number, record in enumerate(rows, start=1):
        origin = Origin(f"{slice_.path}, shard {slice_.start}", "row", number)
        yield Document(_text_of(record, field, origin), origin, f"{slice_.name}:{slice_.start}:{number}")


READERS = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "hf": _read_hf}


def _decode_text(data: bytes, path: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(Origin(path, "line", data.count(b"\n", 0, error.start) + 1), data, error) from None


def _decode_line(line: bytes, origin: Origin) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(origin, line, error) from None


def _not_utf8(origin: Origin, data: bytes, error: UnicodeDecodeError) -> DataError:
    found = data[error.start : error.start + 4].hex(" ")
    return DataError(f"{origin}: not UTF-8: bytes {found} ({error.reason})")


def _text_of(record: Any, field: str, origin: Origin) -> str:
    if not isinstance(record, dict):
        raise DataError(f'{origin}: expected an object with "{field}", got {_short(record)}')
    if field not in record:
        found = ", ".join(record) or "no keys"
        raise DataError(f'{origin}: no "{field}"; it has {found} (data.text_field names the key)')
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f'{origin}: "{field}" must be a string, got {_short(text)}')
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"U+{ord(text[error.start]):04X}"
            raise DataError(f'{origin}: "{field}" holds {half}, half of a surrogate pair') from None
    return text


def _short(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 40 else shown[:37] + "..."
