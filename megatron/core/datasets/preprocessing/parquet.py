"""Parquet files, row group by row group, a bounded batch at a time."""

import os
from collections.abc import Iterator
from typing import Any

from megatron.core.datasets.preprocessing.arrow_rows import check_columns, rows_of
from megatron.core.datasets.preprocessing.records import CorpusError
from megatron.core.datasets.preprocessing.shares import records_between
from megatron.core.datasets.preprocessing.units import Unit

_BATCH_BYTES = 1 << 22


class ParquetFile:
    """One file; its rows are documents.

    Raises:
        CorpusError: if it is damaged, or lacks a column of text for a key.
    """

    def __init__(self, path: str, keys: tuple[str, ...]) -> None:
        self.path = path
        self._keys = keys
        self.size = max(os.path.getsize(path), 1)
        check_columns(path, self._open().schema_arrow, keys)

    def units(self, start: int, end: int) -> Iterator[Unit]:
        """Rows in Arrow form."""
        import pyarrow as pa

        file = self._open()
        metadata = file.metadata
        if not metadata.num_rows:
            return
        first, last = records_between(start, end, self.size, metadata.num_rows)
        weight = self.size / metadata.num_rows
        row = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if row < last and row + group.num_rows > first:
                try:
                    yield from self._group(file, number, row, first, last, weight)
                except (pa.ArrowException, OSError) as error:
                    raise CorpusError(
                        f"{self.path}: row group {number}: damaged: {error}"
                    ) from error
            row += group.num_rows

    def _group(
        self, file: Any, number: int, row: int, first: int, last: int, weight: float
    ) -> Iterator[Unit]:
        group = file.metadata.row_group(number)
        average = max(group.total_byte_size // max(group.num_rows, 1), 1)
        rows = min(max(_BATCH_BYTES // average, 1), 1 << 14)
        for batch in file.iter_batches(rows, [number], columns=list(self._keys), use_threads=False):
            low, high = max(first - row, 0), min(last - row, batch.num_rows)
            if low < high:
                part = batch.slice(low, high - low)
                yield from rows_of(self.path, part, self._keys, row + low, weight)
            row += batch.num_rows

    def _open(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise CorpusError(f"{self.path}: not a whole parquet file: {error}") from error
