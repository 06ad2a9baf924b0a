"""Which part of the input one task of an array reads.

The sources, in order, lie on one axis as long as their sizes in bytes; task ``i`` of ``n`` takes
the documents that start in ``[i, i + 1) * length / n``. In a plain jsonl file a document starts at
its line's offset; in a file that can't be entered in the middle (compressed, parquet, a dataset
folder) record ``k`` of ``m`` starts at ``k / m`` of its size. So shares are contiguous, disjoint,
cover everything, and don't depend on who computes them: shards, merged in order, are the bytes of
a single run.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from megatron.core.datasets.preprocessing.records import CorpusError
from megatron.core.datasets.preprocessing.units import Source, Unit


@dataclasses.dataclass(frozen=True)
class Share:
    """Part ``index`` of ``count``."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise CorpusError(f"--num-shards {self.count} must be at least 1")
        if not 0 <= self.index < self.count:
            raise CorpusError(
                f"--shard-index {self.index} must be in 0..{self.count - 1} "
                f"(--num-shards {self.count})"
            )

    def bounds(self, total: int) -> tuple[int, int]:
        """[start, end) of this share on an axis of ``total``."""
        return total * self.index // self.count, total * (self.index + 1) // self.count


def parts_of(sources: Sequence[Source], share: Share) -> list[tuple[Source, int, int]]:
    """(source, start, end) for each source that the share touches, in order."""
    first, last = share.bounds(sum(source.size for source in sources))
    parts, offset = [], 0
    for source in sources:
        start, end = max(first - offset, 0), min(last - offset, source.size)
        if start < end:
            parts.append((source, start, end))
        offset += source.size
    return parts


def units_of(parts: Sequence[tuple[Source, int, int]]) -> Iterator[Unit]:
    """The work of the parts, in order, made as it is asked for."""
    for source, start, end in parts:
        yield from source.units(start, end)


def records_between(start: int, end: int, size: int, records: int) -> tuple[int, int]:
    """First record and end of those ``k`` with ``start <= k * size / records < end``."""
    return -(-start * records // size), -(-end * records // size)
