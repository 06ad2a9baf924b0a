"""Folders written by Hugging Face ``datasets`` (``save_to_disk``), read through that library.

Selections and shuffles that the folder records are honoured. Read from the memory map, a bounded
batch of rows at a time.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from megatron.core.datasets.preprocessing.arrow_rows import check_columns, rows_of
from megatron.core.datasets.preprocessing.records import CorpusError
from megatron.core.datasets.preprocessing.shares import records_between
from megatron.core.datasets.preprocessing.units import Unit

_BATCH_BYTES = 1 << 22
_SPLITS = "dataset_dict.json"


def is_dataset_folder(path: str) -> bool:
    """Whether ``save_to_disk`` wrote it."""
    return any(os.path.exists(os.path.join(path, name)) for name in ("state.json", _SPLITS))


class DatasetFolder:
    """One saved dataset; its rows are documents.

    Raises:
        CorpusError: if it holds several splits, can't be read, or lacks a column of text.
    """

    def __init__(self, path: str, keys: tuple[str, ...]) -> None:
        self.path = path
        self._keys = keys
        if os.path.exists(os.path.join(path, _SPLITS)):
            splits = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
            raise CorpusError(
                f"{path}: holds several splits ({', '.join(splits)}); name one: "
                f"--input {os.path.join(path, splits[0] if splits else 'SPLIT')}"
            )
        self.size = 1
        self._dataset = None if _has_no_files(path) else self._load()
        if self._dataset is not None:
            check_columns(path, self._dataset.data.schema, keys)
            self.size = max(int(self._dataset.data.nbytes), 1)

    def units(self, start: int, end: int) -> Iterator[Unit]:
        """Rows in Arrow form."""
        total = 0 if self._dataset is None else len(self._dataset)
        if not total:
            return
        assert self._dataset is not None
        row, last = records_between(start, end, self.size, total)
        weight = self.size / total
        rows = min(max(int(_BATCH_BYTES / max(weight, 1.0)), 1), 1 << 14)
        table = self._dataset.select_columns(list(self._keys)).with_format("arrow")
        while row < last:
            count = min(rows, last - row)
            for batch in table[row : row + count].to_batches():
                yield from rows_of(self.path, batch, self._keys, row, weight)
                row += batch.num_rows

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise CorpusError(
                "reading a dataset folder needs the datasets package: pip install datasets"
            ) from error
        try:
            dataset = datasets.load_from_disk(self.path, keep_in_memory=False)
        except Exception as error:  # whatever the library raises for a broken folder
            raise CorpusError(f"{self.path}: datasets can't load it: {error}") from error
        return dataset


def _has_no_files(path: str) -> bool:
    """A dataset saved without a row has no file, and the library can't load it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        with open(os.path.join(path, "state.json"), encoding="utf-8") as file:
            return json.load(file).get("_data_files") == []
    return False
