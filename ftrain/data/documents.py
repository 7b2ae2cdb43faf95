"""Files -> documents, streaming: a file is never held whole unless it is one document.

Empty documents are left out (they would be a boundary and nothing else); one of only white space is kept.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

from .errors import DataError
from .sources import HF, File

CHUNK = 1 << 20
BOM = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """A text, where it came from (file, and line or row), and the key that decides whether it is held out."""

    origin: str
    text: str
    key: str


def read_documents(file: File, field: str = "text") -> Iterator[Document]:
    """The documents of one file, in order. field: the JSON key or column that holds the text.

    Raises DataError naming the file and its line (row) where something cannot be read."""
    try:
        for document in READERS[file.kind](file, field):
            if document.text:
                yield document
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file.path}: cannot be read: {error}") from error


def is_held_out(key: str, share: float) -> bool:
    """Whether the document of this key is held out: the hash of the key is in the lowest `share` of all
    hashes.

    Depends on nothing else, so adding documents moves none from one side to the other."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") < share * 2**64


def _read_text(file: File, field: str) -> Iterator[Document]:
    data = b"".join(_chunks(file.path)).removeprefix(BOM)
    yield Document(file.path, _decode(data, file.path, first_line=1), file.name)


def _read_jsonl(file: File, field: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(_chunks(file.path)), start=1):
        if number == 1:
            line = line.removeprefix(BOM)
        if not line.strip():
            continue
        origin = f"{file.path}, line {number}"
        try:
            record = json.loads(_decode(line, file.path, first_line=number))
        except json.JSONDecodeError as error:
            raise DataError(f"{origin}: not a JSON value: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise DataError(f"{origin}: the JSON value is nested too deeply") from None
        yield Document(origin, _text_of(record, field, origin), f"{file.name}:{number}")


def _read_parquet(file: File, field: str) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{file.path}: parquet needs pyarrow: pip install ftrain[data]") from None
    try:
        table = pyarrow.parquet.ParquetFile(file.path)
        if field not in table.schema_arrow.names:
            raise DataError(f'{file.path}: no column "{field}"; it has {", ".join(table.schema_arrow.names)}')
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=[field]):
            for text in batch.column(0).to_pylist():
                row += 1
                origin = f"{file.path}, row {row}"
                yield Document(origin, _text_of({field: text}, field, origin), f"{file.name}:{row}")
    except pyarrow.ArrowException as error:
        raise DataError(f"{file.path}: not readable as parquet: {error}") from error


def _read_hf(file: File, field: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError:
        raise DataError(f'data.source = "{file.path}" needs datasets: pip install ftrain[data]') from None
    name, config, split = (file.path.removeprefix(HF).split(":") + ["", ""])[:3]
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:  # the library raises a dozen kinds, its own and others'
        raise DataError(f'data.source = "{file.path}": {type(error).__name__}: {error}') from error
    for row, record in enumerate(rows, start=1):
        origin = f"{file.path}, row {row}"
        yield Document(origin, _text_of(record, field, origin), f"{file.name}:{row}")


READERS = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "hf": _read_hf}


def _chunks(path: str) -> Iterator[bytes]:
    """The bytes of a file in pieces, decompressed if its name says so. A cut compressed file is an error."""
    if path.endswith(".zst"):
        yield from _zst_chunks(path)
        return
    with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as stream:
        while chunk := stream.read(CHUNK):
            yield chunk


def _zst_chunks(path: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path}: .zst needs zstandard: pip install ftrain[data]") from None
    frames = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame, pending = None, b""
    with open(path, "rb") as stream:
        while pending or (pending := stream.read(CHUNK)):
            # One object a frame: the library's stream reader takes a file cut in mid-frame for a short file.
            frame = frame or frames.decompressobj()
            try:
                yield frame.decompress(pending)
            except zstandard.ZstdError as error:
                raise DataError(f"{path}: not readable as zst: {error}") from error
            pending = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        raise DataError(f"{path}: cut short: its last zst frame has no end")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their ends, split at LF alone: U+2028, U+0085 and a lone CR belong to the text."""
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


def _decode(data: bytes, path: str, first_line: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        found = data[error.start : error.start + 4].hex(" ")
        raise DataError(f"{path}, line {line}: not UTF-8: bytes {found} ({error.reason})") from None


def _text_of(record: Any, field: str, origin: str) -> str:
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
