"""Parquet files through pyarrow, which is loaded when the first is read."""

from collections.abc import Iterator
from typing import Any

from .errors import DataError


def open_parquet(path: str) -> Any:
    """The file as pyarrow's ParquetFile; DataError where it is none, or where pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: parquet needs pyarrow: pip install 'ftrain[data]'") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not readable as parquet: {error}") from error


def group_starts(path: str, size: int, step: int) -> tuple[list[int], int]:
    """Row groups that begin about every `step` bytes of a file of `size`, and how many groups there are."""
    n_groups = open_parquet(path).metadata.num_row_groups
    together = max(1, round(step * n_groups / size))
    return list(range(0, n_groups, together)), n_groups


def read_rows(path: str, column: str, start: int, stop: int | None) -> Iterator[tuple[int, Any]]:
    """(row number in the file, from 1; value of `column`) of row groups [start, stop), to the last if None."""
    file = open_parquet(path)
    if column not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise DataError(f'{path}: no column "{column}"; it has {names} (data.text_field names the column)')
    n_groups = file.metadata.num_row_groups
    number = sum(file.metadata.row_group(group).num_rows for group in range(start))
    groups = list(range(start, n_groups if stop is None else stop))
    import pyarrow

    try:
        for batch in file.iter_batches(batch_size=1024, columns=[column], row_groups=groups):
            for value in batch.column(0).to_pylist():
                number += 1
                yield number, value
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}, after row {number}: not readable as parquet: {error}") from error
