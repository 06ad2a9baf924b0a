"""Counts of attention work and of remote rows, without making a single task.

    visible_before   visible pairs of all query rows in front of a position (prefix sums of work)
    pair_matrix      visible pairs of each (ring rank, source): balance, MFU, the lock-step ring
    remote_rows      rows each ring rank fetches and serves in the needed-rows exchange

All are exact, equal to the sums over ``tasks.rank_tasks`` (tested), and vectorised over documents
and chunks so that 16M tokens on 4,096 ranks take seconds: chunk layouts cost one step per pair of
chunks inside a document, striped costs O(ring_size x (ring_size + documents)).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.context_parallel.checks import check_window
from megatron.core.context_parallel.documents import (
    IntArray,
    document_bounds,
    normalize_cu_seqlens,
)
from megatron.core.context_parallel.layout import Layout
from megatron.core.context_parallel.prefix import band_pairs, expand_ranges
from megatron.core.context_parallel.tasks import rank_tasks

BLOCK = 1 << 22
"""Elements worked on at once, to bound temporary memory (about 0.3 GB)."""


def pair_matrix(
    layout: Layout, cu_seqlens: Any = None, *, window: int | None = None, causal: bool = True
) -> IntArray:
    """int64 [ring_size, ring_size]: visible pairs of each (query rank, source rank)."""
    check_window(window, causal)
    bounds = normalize_cu_seqlens(cu_seqlens, layout.seq_length)
    if not causal:
        return _bidirectional_pairs(layout, bounds)
    if layout.chunk_owners is not None:
        return _chunk_pairs(layout, layout.chunk_owners, bounds, window)
    if window is None:
        return _striped_pairs(layout.ring_size, bounds)
    rows = [
        [table.pairs for table in rank_tasks(layout, rank, bounds, window=window)]
        for rank in range(layout.ring_size)
    ]
    return np.array(rows, dtype=np.int64)


def remote_rows(
    layout: Layout, cu_seqlens: Any = None, *, window: int | None = None, causal: bool = True
) -> tuple[IntArray, IntArray]:
    """(rows fetched, rows served) of each ring rank, int64 [ring_size] each.

    A row served to three ranks counts three times. Own rows count in neither.
    """
    check_window(window, causal)
    bounds = normalize_cu_seqlens(cu_seqlens, layout.seq_length)
    if causal and layout.chunk_owners is not None:
        return _chunk_rows(layout, layout.chunk_owners, bounds, window)
    fetched = np.zeros(layout.ring_size, dtype=np.int64)
    served = np.zeros(layout.ring_size, dtype=np.int64)
    step = max(1, BLOCK // layout.ring_size)
    for at in range(0, len(bounds) - 1, step):
        some = bounds[at : at + step + 1]
        count = _striped_rows if causal else _bidirectional_rows
        more = count(layout, some, window)
        fetched += more[0]
        served += more[1]
    return fetched, served


def _chunk_pairs(
    layout: Layout, owners: IntArray, bounds: IntArray, window: int | None
) -> IntArray:
    """Pairs inside each chunk, then between each chunk and the chunks its first row sees."""
    ring, length = layout.ring_size, layout.chunk_length
    total = np.zeros(ring * ring, dtype=np.int64)
    edges = np.union1d(bounds, np.arange(len(owners) + 1, dtype=np.int64) * length)
    size = np.diff(edges)
    inside = band_pairs(size, size, 0, (window or layout.seq_length) - 1)
    own = owners[edges[:-1] // length]
    np.add.at(total, own * ring + own, inside)

    first = np.arange(len(owners), dtype=np.int64) * length
    start, end = document_bounds(bounds, first)
    seen = start if window is None else np.maximum(start, first - window + 1)
    rows = np.minimum(first + length, end) - first
    low, high = seen // length, np.where(seen < first, first // length, 0)
    cumulative = np.cumsum(np.maximum(0, high - low))
    cuts = np.searchsorted(cumulative, np.arange(0, cumulative[-1] + BLOCK, BLOCK))
    for begin, stop in zip(cuts, np.append(cuts[1:], len(first))):
        query, source = expand_ranges(low[begin:stop], high[begin:stop])
        query += begin
        k_from = np.maximum(seen[query], source * length)
        k_len = (source + 1) * length - k_from
        if window is None:
            pairs = rows[query] * k_len
        else:
            hi = window - 1 - (first[query] - k_from)
            pairs = band_pairs(rows[query], k_len, 1 - k_len, hi)
        np.add.at(total, owners[query] * ring + owners[source], pairs)
    return total.reshape(ring, ring)


def _chunk_rows(
    layout: Layout, owners: IntArray, bounds: IntArray, window: int | None
) -> tuple[IntArray, IntArray]:
    """A rank fetches, before each of its chunks, the rows back to its last own chunk or to the
    first row seen: what lies further back its earlier chunks fetch anyway."""
    from_row, to_row = chunk_gaps(layout.chunks_of_rank, layout.chunk_length, bounds, window)
    fetched = (to_row - from_row).sum(axis=1)
    served = np.bincount(owners, gap_cover(from_row, to_row, layout.chunk_length, len(owners)))
    return fetched, np.rint(served).astype(np.int64)


def chunk_gaps(
    chunks: IntArray, length: int, bounds: IntArray, window: int | None = None
) -> tuple[IntArray, IntArray]:
    """Global rows [from, to) that each rank fetches in front of each of its chunks.

    Args:
        chunks: [..., chunks per rank] ascending chunk indices of each rank.
        length: tokens of a chunk.
    """
    first = chunks * length
    start, _ = document_bounds(bounds, first)
    seen = start if window is None else np.maximum(start, first - window + 1)
    own_end = np.concatenate((np.zeros_like(first[..., :1]), first[..., :-1] + length), axis=-1)
    return np.minimum(first, np.maximum(seen, own_end)), first


def gap_cover(
    from_row: IntArray, to_row: IntArray, length: int, chunks: int
) -> npt.NDArray[np.float64]:
    """[chunks]: row fetches that fall into each chunk, over all gaps (they end at chunk starts)."""
    change = np.zeros(chunks + 1)
    ends = np.zeros(chunks + 1)
    np.add.at(change, from_row.ravel() // length, 1.0)
    np.add.at(change, to_row.ravel() // length, -1.0)
    np.add.at(ends, from_row.ravel() // length, (from_row % length).ravel().astype(float))
    return (np.cumsum(change) * length - ends)[:chunks]


def _bidirectional_pairs(layout: Layout, bounds: IntArray) -> IntArray:
    total = np.zeros((layout.ring_size, layout.ring_size))
    step = max(1, BLOCK // layout.ring_size)
    for at in range(0, len(bounds) - 1, step):
        rows = np.diff(layout.rows_below_all(bounds[at : at + step + 1])).astype(np.float64)
        total += rows @ rows.T
    return np.rint(total).astype(np.int64)


def _bidirectional_rows(
    layout: Layout, bounds: IntArray, window: int | None
) -> tuple[IntArray, IntArray]:
    rows = np.diff(layout.rows_below_all(bounds))
    has = rows > 0
    fetched = (np.diff(bounds)[None] - rows) * has
    served = rows * np.maximum(0, has.sum(axis=0) - 1)
    return fetched.sum(axis=1), served.sum(axis=1)


def _striped_pairs(ring: int, bounds: IntArray) -> IntArray:
    """Striped work in closed form.

    With residues r, s of query and key counted from a document's start and n tokens of residue r,
    the pairs are n(n+1)/2 for s <= r and n less for s > r. Counted from 0 again, the sources with
    s > r are the cyclic interval from r+1 up to the document's start.
    """
    offset, length = bounds[:-1] % ring, np.diff(bounds)
    whole, rest = length // ring, length % ring
    # Token counts n are whole + 1 on the rest residues from offset on, whole elsewhere.
    plain = np.broadcast_to((whole * (whole + 1) // 2).sum(), (ring,)) + _cyclic_sum(
        ring, offset, rest, whole + 1
    )
    # by_start[query residue, document offset]: sum of n over the documents of that offset.
    change = np.zeros((ring + 1) * ring, dtype=np.int64)
    stop, wraps = np.minimum(offset + rest, ring), np.maximum(0, offset + rest - ring)
    np.add.at(change, offset, whole + (wraps > 0))
    np.add.at(change, offset * ring + offset, 1)
    np.add.at(change, stop * ring + offset, -1)
    np.add.at(change, wraps * ring + offset, -(wraps > 0).astype(np.int64))
    by_start = np.cumsum(change.reshape(ring + 1, ring)[:ring], axis=0)
    # less[r, s]: sum of by_start[r, offset] over the offsets with s in the cyclic (r, offset).
    rank = np.arange(ring)[:, None]
    turn = (rank + 1 + np.arange(ring)[None]) % ring  # columns seen from r + 1 on
    turned = np.take_along_axis(by_start, turn, axis=1)
    behind = turned.sum(axis=1, keepdims=True) - np.cumsum(turned, axis=1)
    less = np.empty_like(by_start)
    np.put_along_axis(less, turn, behind, axis=1)
    return plain[:, None] - less


def _cyclic_sum(ring: int, offset: IntArray, count: IntArray, value: IntArray) -> IntArray:
    """[ring]: sum of value over the items whose cyclic run [offset, offset + count) holds r."""
    change = np.zeros(2 * ring + 1, dtype=np.int64)
    np.add.at(change, offset, value)
    np.add.at(change, offset + count, -value)
    line = np.cumsum(change)[: 2 * ring]
    return line[:ring] + line[ring:]


def _striped_rows(
    layout: Layout, bounds: IntArray, window: int | None
) -> tuple[IntArray, IntArray]:
    """Each token of a rank fetches the rows back to the rank's token before it in the document;
    each token serves every rank with a later token in sight."""
    ring = layout.ring_size
    reach = (window or layout.seq_length) - 1
    start, end = bounds[:-1], bounds[1:]
    rank = np.arange(ring, dtype=np.int64)[:, None]
    lead = (rank - start) % ring  # rows of the document in front of the rank's first token
    count = np.maximum(0, -((start + lead - end) // ring))
    fetched = np.minimum(reach, lead) + (count - 1) * min(reach, ring - 1)
    after = (end - 1 - rank) % ring  # rows of the document behind the rank's last token
    most = min(reach, ring - 1)
    served = (count - 1) * most + np.minimum(most, after)
    return (fetched * (count > 0)).sum(axis=1), (served * (count > 0)).sum(axis=1)
