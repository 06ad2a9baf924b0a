"""What a pair of token files holds: how many documents of which length, and whether it is sound.

Lengths come from the index alone (8 bytes a document of memory). ``scan_ids`` reads every token
once, 32 MB at a time.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.indexed_dataset import IndexedDataset

_SCAN_TOKENS = 1 << 23
Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class LengthBucket:
    """Documents with ``low <= tokens < high``."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class LongerThan:
    """Documents of more than ``limit`` tokens."""

    limit: int
    documents: int
    tokens: int
    share: float
    """Of all tokens."""


def document_lengths(dataset: IndexedDataset) -> Int64Array:
    """int64 [documents]: tokens of each."""
    return np.asarray(dataset.document_lengths, dtype=np.int64)


def length_histogram(lengths: Int64Array) -> list[LengthBucket]:
    """Buckets by powers of two, from the shortest document's to the longest's; 0 apart."""
    buckets = []
    empty = int((lengths == 0).sum())
    if empty:
        buckets.append(LengthBucket(0, 1, empty, 0))
    full = lengths[lengths > 0]
    if not len(full):
        return buckets
    powers = np.frexp(full.astype(np.float64))[1] - 1  # floor of log2, exact for integers < 2**53
    documents = np.bincount(powers)
    tokens = [int(full[powers == power].sum()) for power in range(len(documents))]
    for power in range(int(powers.min()), len(documents)):
        buckets.append(LengthBucket(1 << power, 2 << power, int(documents[power]), tokens[power]))
    return buckets


def longer_than(lengths: Int64Array, limits: Sequence[int] | None = None) -> list[LongerThan]:
    """Tokens in documents longer than each limit (default: 1K, 2K, 4K ... to the longest)."""
    ordered = np.sort(lengths)
    total = int(ordered.sum())
    before = np.concatenate(([0], np.cumsum(ordered)))
    if limits is None:
        longest = int(ordered[-1]) if len(ordered) else 0
        limits = [1 << power for power in range(10, 41) if (1 << power) <= max(longest, 1024)]
    rows = []
    for limit in limits:
        place = int(np.searchsorted(ordered, limit, "right"))
        tokens = total - int(before[place])
        rows.append(LongerThan(limit, len(ordered) - place, tokens, tokens / max(total, 1)))
    return rows


@dataclasses.dataclass(frozen=True)
class IdScan:
    """Smallest and largest id of all tokens (0, -1 if there are none)."""

    smallest: int
    largest: int


def scan_ids(dataset: IndexedDataset) -> IdScan:
    """Read every token."""
    tokens: npt.NDArray[Any] = dataset.all_tokens()
    smallest, largest = 0, -1
    for start in range(0, len(tokens), _SCAN_TOKENS):
        part = tokens[start : start + _SCAN_TOKENS]
        low, high = int(part.min()), int(part.max())
        smallest = low if start == 0 else min(smallest, low)
        largest = high if start == 0 else max(largest, high)
    return IdScan(smallest, largest)


def summary_lines(dataset: IndexedDataset) -> list[str]:
    """Counts, a line each."""
    lengths = document_lengths(dataset)
    lines = [
        f"{dataset.path_prefix}: {len(lengths):,} documents, {len(dataset):,} sequences, "
        f"{dataset.num_tokens:,} tokens of {dataset.dtype}, "
        f"{dataset.num_tokens * dataset.dtype.itemsize / 1e6:,.2f} MB"
    ]
    if len(lengths):
        points = np.percentile(lengths, [50, 90, 99])
        lines.append(
            f"document length: shortest {int(lengths.min()):,}, mean {lengths.mean():,.1f}, "
            f"median {points[0]:,.0f}, 90 % {points[1]:,.0f}, 99 % {points[2]:,.0f}, "
            f"longest {int(lengths.max()):,}"
        )
    return lines


def histogram_lines(buckets: Sequence[LengthBucket]) -> list[str]:
    """The histogram as a table."""
    total = max(sum(bucket.tokens for bucket in buckets), 1)
    lines = [f"{'tokens':>21} {'documents':>12} {'in tokens':>16} {'share':>7}"]
    for bucket in buckets:
        lines.append(
            f"{f'{bucket.low:,}-{bucket.high - 1:,}':>21} {bucket.documents:>12,} "
            f"{bucket.tokens:>16,} {100 * bucket.tokens / total:>6.1f}%"
        )
    return lines


def longer_lines(rows: Sequence[LongerThan]) -> list[str]:
    """Documents above each length as a table."""
    lines = [f"{'longer than':>21} {'documents':>12} {'in tokens':>16} {'share':>7}"]
    for row in rows:
        lines.append(
            f"{row.limit:>21,} {row.documents:>12,} {row.tokens:>16,} {100 * row.share:>6.1f}%"
        )
    return lines
