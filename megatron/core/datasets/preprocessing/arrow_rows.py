"""Rows of Arrow record batches: what parquet files and dataset folders are made of.

The main process iterates over record batches (a column is never combined: 32-bit string offsets
would overflow beyond 2 GB), cuts them by the bytes of their strings, and sends each piece in
Arrow's own IPC form. Plain, large, view and dictionary-encoded strings give the same texts.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron.core.datasets.preprocessing import records
from megatron.core.datasets.preprocessing.records import CorpusError, Record
from megatron.core.datasets.preprocessing.units import UNIT_BYTES


@dataclasses.dataclass(frozen=True)
class ArrowRows:
    """Some rows, in Arrow IPC form; columns in the order of the keys."""

    path: str
    payload: bytes
    first_row: int
    weight: int

    def records(self, keys: tuple[str, ...]) -> Iterator[Record]:
        import pyarrow as pa

        with pa.ipc.open_stream(self.payload) as reader:
            batch = reader.read_next_batch()
        columns = [batch.column(i) for i in range(len(keys))]
        for row in range(batch.num_rows):
            yield _record(row, columns, keys)

    def locate(self, index: int) -> str:
        return f"{self.path}: row {self.first_row + index} (counted from 0)"


def _record(row: int, columns: list[Any], keys: tuple[str, ...]) -> Record:
    texts = []
    for column, key in zip(columns, keys):
        try:
            text = column[row].as_py()
        except UnicodeDecodeError as error:
            return Record(row, reason=records.NOT_UTF8, detail=f"{key!r}, byte {error.start}")
        if text is None:
            return Record(row, reason=records.NULL, detail=f"{key!r} is null")
        texts.append(text)
    return Record(row, tuple(texts))


def check_columns(path: str, schema: Any, keys: tuple[str, ...]) -> None:
    """Each key must be a column of strings.

    Raises:
        CorpusError: naming the file, the column and what there is.
    """
    for key in keys:
        if key not in schema.names:
            there = ", ".join(map(repr, schema.names[:12])) or "none"
            raise CorpusError(f"{path}: no column {key!r} (there: {there}); see --json-keys")
        if schema.names.count(key) > 1:
            raise CorpusError(
                f"{path}: {schema.names.count(key)} columns are called {key!r}; keep or rename one"
            )
        if not _is_text(schema.field(key).type):
            raise CorpusError(
                f"{path}: column {key!r} is {schema.field(key).type}, not strings; see --json-keys"
            )


def rows_of(
    path: str, batch: Any, keys: tuple[str, ...], first_row: int, row_weight: float
) -> Iterator[ArrowRows]:
    """A record batch in pieces of about ``UNIT_BYTES`` of text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = [_plain(batch.column(batch.schema.get_field_index(key))) for key in keys]
    sizes = sum(
        np.asarray(pc.fill_null(pc.binary_length(column), 0)).astype(np.int64) for column in columns
    )
    table = pa.RecordBatch.from_arrays(columns, names=[str(i) for i in range(len(keys))])
    ends = np.cumsum(sizes)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        end = max(int(np.searchsorted(ends, before + UNIT_BYTES, "right")), start + 1)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_batch(table.slice(start, end - start))
        weight = round((end - start) * row_weight)
        yield ArrowRows(path, sink.getvalue().to_pybytes(), first_row + start, weight)
        start = end


def _plain(column: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(pa.large_string())
    return column.cast(pa.large_string()) if pa.types.is_string_view(column.type) else column


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )
