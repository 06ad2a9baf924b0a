"""Text files: each file is one document, whole, as it is (CRLF kept)."""

import dataclasses
import os
from collections.abc import Iterator

from megatron.core.datasets.preprocessing import compression, records
from megatron.core.datasets.preprocessing.records import CorpusError, Record
from megatron.core.datasets.preprocessing.units import UNIT_BYTES, Unit


@dataclasses.dataclass(frozen=True)
class TextBatch:
    """A few files, read by the worker."""

    paths: tuple[str, ...]
    weight: int

    def records(self, keys: tuple[str, ...]) -> Iterator[Record]:
        for index, path in enumerate(self.paths):
            try:
                data = compression.read_all(path)
            except OSError as error:
                raise CorpusError(f"{path}: {error.strerror}") from error
            text, problem = records.decode_file(data)
            if problem:
                yield Record(index, reason=records.NOT_UTF8, detail=problem)
            else:
                yield Record(index, (text,) * len(keys))

    def locate(self, index: int) -> str:
        return self.paths[index]


class TextFiles:
    """A run of text files, in order."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths
        self._sizes = [max(os.path.getsize(path), 1) for path in paths]
        self.path = paths[0]
        self.size = sum(self._sizes)

    def units(self, start: int, end: int) -> Iterator[Unit]:
        """Batches of the files that start in ``[start, end)``."""
        batch: list[str] = []
        weight = offset = 0
        for path, size in zip(self._paths, self._sizes):
            if start <= offset < end:
                if batch and weight + size > UNIT_BYTES:
                    yield TextBatch(tuple(batch), weight)
                    batch, weight = [], 0
                batch.append(path)
                weight += size
            offset += size
        if batch:
            yield TextBatch(tuple(batch), weight)
