"""Attention between ring ranks as a short list of tasks that need no S x S mask.

A task is a rectangle of (query rows of one ring rank) x (key rows of a source ring rank) with a
band:

    q rows [q_start, q_end) and k rows [k_start, k_end) are LOCAL rows of the two ring shards;
    with i and j counted from q_start and k_start, the pair (i, j) is visible iff lo <= i - j <= hi.

``lo <= -(k_len - 1)`` and ``hi >= q_len - 1`` is a full rectangle; ``lo = 0`` with a square and no
upper limit is ordinary causal attention. Tables come out normalised: every row and every column of
a task sees something, lo and hi are clamped to those two values, tasks of one (rank, source) are
disjoint, ordered by q_start, and together cover exactly the visible pairs.

Why so few (chunk layouts). For key rows in front of a query run [a, b) only the document [s, e)
that holds a can be seen, and it is seen wholly: the dense rectangle [a, min(b, e)) x [s, a). As
local order is global order, the rows of [s, a) on any source are one local range. On the own rank
each document is one local range, and its mask is causal. So one document in zigzag costs one call
per off-diagonal step and one causal call on the diagonal, as in Megatron. In the striped layout
(Striped Attention) each document is a run on every rank and its mask is causal, strictly when the
source's token comes later at equal local index. A sliding window adds an upper limit to i - j;
documents no longer than the window do not notice it.

Cost: O(documents + runs x sources) of numpy per rank, no token is ever enumerated. ``split_band``
cuts what is left of bands for kernels that know only full and causal.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.core.context_parallel.checks import check_window
from megatron.core.context_parallel.documents import (
    IntArray,
    document_bounds,
    normalize_cu_seqlens,
)
from megatron.core.context_parallel.layout import Layout
from megatron.core.context_parallel.prefix import (
    band_pairs,
    expand_ranges,
    is_causal_square,
    is_full_band,
)

FAR = 1 << 60
"""Stands for "no limit" in lo and hi until they are clamped."""


class Task(NamedTuple):
    """Local query rows x local key rows of one source, visible iff lo <= i - j <= hi."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    lo: int
    hi: int

    @property
    def q_len(self) -> int:
        return self.q_end - self.q_start

    @property
    def k_len(self) -> int:
        return self.k_end - self.k_start

    @property
    def is_full(self) -> bool:
        """Every pair is visible."""
        return bool(is_full_band(self.q_len, self.k_len, self.lo, self.hi))

    @property
    def is_causal(self) -> bool:
        """A square with i >= j visible: what kernels call is_causal, however they align it.

        A square of one row is both full and causal.
        """
        return bool(is_causal_square(self.q_len, self.k_len, self.lo, self.hi))

    @property
    def pairs(self) -> int:
        """Visible pairs."""
        return int(band_pairs(self.q_len, self.k_len, self.lo, self.hi))


@dataclasses.dataclass(frozen=True, eq=False)
class TaskTable:
    """The tasks of one ring rank against one source; iterates as :class:`Task`."""

    array: IntArray
    """[tasks, 6]: q_start, q_end, k_start, k_end, lo, hi."""

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __getitem__(self, index: int) -> Task:
        return self.tasks[index]

    @functools.cached_property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(Task(*row) for row in self.array.tolist())

    @functools.cached_property
    def pairs(self) -> int:
        """Visible pairs of all tasks."""
        q0, q1, k0, k1, lo, hi = self.array.T
        return int(band_pairs(q1 - q0, k1 - k0, lo, hi).sum())

    def key_rows(self) -> IntArray:
        """[runs, 2]: the local rows of the source that any task reads, as joined runs."""
        return join_runs(self.array[:, 2:4])


def rank_tasks(
    layout: Layout,
    ring_rank: int,
    cu_seqlens: Any = None,
    *,
    window: int | None = None,
    causal: bool = True,
) -> tuple[TaskTable, ...]:
    """Tasks of one ring rank against every source ring rank (its own included), by source.

    Args:
        layout: who holds what.
        ring_rank: the rank that holds the queries.
        cu_seqlens: document boundaries of the whole row; None for one document.
        window: keys j with 0 <= i - j < window are visible (global positions), None for all.
        causal: False for attention in both directions inside each document.

    Raises:
        ValueError: for bad boundaries, a window below 1 or without causality, a rank outside.
    """
    check_window(window, causal)
    layout.check_rank(ring_rank)
    bounds = normalize_cu_seqlens(cu_seqlens, layout.seq_length)
    if not causal:
        rows = _bidirectional(layout, ring_rank, bounds)
    elif layout.chunk_owners is None:
        rows = _striped(layout, ring_rank, bounds, window)
    else:
        rows = _chunked(layout, ring_rank, bounds, window)
    source, table = rows[:, 0], _normalize(rows[:, 1:])
    keep = _sees(table)
    source, table = source[keep], table[keep]
    order = np.lexsort((table[:, 2], table[:, 0], source))
    cuts = np.searchsorted(source[order], np.arange(layout.ring_size + 1))
    table = table[order]
    return tuple(TaskTable(table[cuts[i] : cuts[i + 1]]) for i in range(layout.ring_size))


def join_runs(runs: IntArray) -> IntArray:
    """Union of half-open runs [n, 2] as sorted, disjoint runs that do not touch."""
    if len(runs) == 0:
        return runs.reshape(0, 2)
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])
    opens = np.concatenate(([True], runs[1:, 0] > reach[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return np.stack((runs[opens, 0], reach[closes]), axis=1)


def trim_tasks(tasks: IntArray) -> IntArray:
    """Tasks [n, 6] normalised, without those that see nothing."""
    trimmed = _normalize(tasks.reshape(-1, 6))
    return trimmed[_sees(trimmed)]


def split_band(task: Task, tile: int = 256) -> list[Task]:
    """Cut a task into full rectangles, causal squares and small masked tiles.

    The pieces are disjoint, cover the same pairs, and are relative to their own corner like any
    task. A piece that is neither full nor causal has at most ``tile`` rows and, beyond the width of
    the band, ``tile`` columns; inside a task all such tiles but the first and last few have one
    shape and one (lo, hi), so one shared mask serves them. For a sliding window each block of
    ``tile`` rows gives one masked tile (the far edge), one full rectangle and one causal square.

    Raises:
        ValueError: for a ``tile`` below 1.
    """
    if tile < 1:
        raise ValueError(f"tile {tile} must be at least 1")
    if task.is_full or task.is_causal:
        return [task]
    pieces = []
    for top in range(0, task.q_len, tile):
        bottom = min(top + tile, task.q_len)
        # Columns that some row of the block sees, and columns that all its rows see.
        first, last = max(0, top - task.hi), min(task.k_len, bottom - task.lo)
        all_first = min(last, max(first, bottom - 1 - task.hi))
        all_last = max(first, min(last, top - task.lo + 1))
        if last - all_last and bottom - top == last - all_last + 1:
            all_last -= 1  # with one more column the near edge is a causal square
        if all_first >= all_last:
            edges = [(first, last)]
        else:
            edges = [(first, all_first), (all_first, all_last), (all_last, last)]
        pieces += [_piece(task, top, bottom, left, right) for left, right in edges if right > left]
    return [piece for piece in pieces if piece.q_len and piece.k_len and piece.lo <= piece.hi]


def _piece(task: Task, top: int, bottom: int, left: int, right: int) -> Task:
    """Rows [top, bottom) x columns [left, right) of a task, normalised."""
    shift = top - left
    row = [
        task.q_start + top,
        task.q_start + bottom,
        task.k_start + left,
        task.k_start + right,
        task.lo - shift,
        task.hi - shift,
    ]
    return Task(*_normalize(np.array([row], dtype=np.int64))[0].tolist())


def _normalize(table: IntArray) -> IntArray:
    """Trim rows and columns that see nothing, then clamp lo and hi."""
    q0, q1, k0, k1, lo, hi = table.T
    q_len, k_len = q1 - q0, k1 - k0
    row0, row1 = np.maximum(0, lo), np.minimum(q_len, hi + k_len)
    col0, col1 = np.maximum(0, -hi), np.minimum(k_len, q_len - lo)
    shift = row0 - col0
    lo, hi = lo - shift, hi - shift
    lo, hi = np.maximum(lo, 1 - (col1 - col0)), np.minimum(hi, row1 - row0 - 1)
    return np.stack((q0 + row0, q0 + row1, k0 + col0, k0 + col1, lo, hi), axis=1)


def _sees(table: IntArray) -> npt.NDArray[np.bool_]:
    """bool [n]: which normalised tasks see any pair."""
    q0, q1, k0, k1, lo, hi = table.T
    visible: npt.NDArray[np.bool_] = (q1 > q0) & (k1 > k0) & (lo <= hi)
    return visible


def _rows(*columns: Any) -> IntArray:
    """Columns (arrays or numbers) broadcast together and stacked: [n, 7] with the source first."""
    return np.stack([np.ravel(c) for c in np.broadcast_arrays(*columns)], axis=1).astype(np.int64)


def _bidirectional(layout: Layout, rank: int, bounds: IntArray) -> IntArray:
    """Each document is one local run on each rank: one full rectangle per document and source."""
    mine = layout.rows_below(rank, bounds)
    has = mine[1:] > mine[:-1]
    starts, ends = bounds[:-1][has], bounds[1:][has]
    k0, k1 = layout.rows_below_all(starts), layout.rows_below_all(ends)
    source = np.arange(layout.ring_size)[:, None]
    return _rows(source, mine[:-1][has], mine[1:][has], k0, k1, -FAR, FAR)


def _striped(layout: Layout, rank: int, bounds: IntArray, window: int | None) -> IntArray:
    """Query i at rank + R*i, key j at source + R*j: a band of i - j, the same for all documents."""
    mine = layout.rows_below(rank, bounds)
    has = mine[1:] > mine[:-1]
    q0, q1 = mine[:-1][has], mine[1:][has]
    k0 = layout.rows_below_all(bounds[:-1][has])
    k1 = layout.rows_below_all(bounds[1:][has])
    source = np.arange(layout.ring_size)[:, None]
    lo = (source > rank).astype(np.int64)
    hi = np.int64(FAR) if window is None else (window - 1 - rank + source) // layout.ring_size
    return _rows(source, q0, q1, k0, k1, lo - (q0 - k0), hi - (q0 - k0))


def _chunked(layout: Layout, rank: int, bounds: IntArray, window: int | None) -> IntArray:
    """Tasks of a layout of contiguous runs: see the module docstring."""
    length = np.diff(bounds)
    long = np.zeros(len(length), dtype=bool) if window is None else length > window
    mine = layout.rows_below(rank, bounds)
    own = ~long & (mine[1:] > mine[:-1])
    q0, q1 = mine[:-1][own], mine[1:][own]
    parts = [_rows(rank, q0, q1, q0, q1, 0, FAR)]
    runs = layout.interval_array(rank)
    first, last = runs[:, 0], runs[:, 1]
    start, end = document_bounds(bounds, first)
    head = start < first  # the run opens inside a document: rows before it are visible
    spans = np.stack((layout.rows_below(rank, first), first, np.minimum(last, end)), axis=1)
    fits = head & (window is None or end - start <= window)
    parts.append(_full_before(layout, spans[fits], start[fits], skip=rank))
    if window is not None and long.any():
        wide = head & ~fits
        seen = np.maximum(start, np.minimum(spans[:, 2] - window, first))
        parts.append(_full_before(layout, spans[wide], seen[wide], skip=None))
        parts.append(_window_edges(layout, rank, runs, start, end, wide, window))
        parts.append(_window_diagonals(layout, rank, runs, bounds, long, window))
    return np.concatenate(parts)


def _full_before(
    layout: Layout, spans: IntArray, seen_from: IntArray, skip: int | None
) -> IntArray:
    """Rows [first, stop) of each span x all rows of [seen_from, first), but of source ``skip``.

    A span is (local row of first, first, stop). Neighbours that see the same rows of a source are
    joined into one rectangle.
    """
    run_row, first, stop = spans.T
    k0, k1 = layout.rows_below_all(seen_from), layout.rows_below_all(first)
    source = np.arange(layout.ring_size)[:, None]
    rows = _rows(source, run_row, run_row + stop - first, k0, k1, -FAR, FAR)
    rows = rows[rows[:, 4] > rows[:, 3]]
    if skip is not None:
        rows = rows[rows[:, 0] != skip]
    if len(rows) == 0:
        return rows
    ahead, behind = rows[1:], rows[:-1]
    joins = (ahead[:, [0, 1, 3, 4]] == behind[:, [0, 2, 3, 4]]).all(axis=1)
    opens = np.concatenate(([True], ~joins))
    closes = np.concatenate((opens[1:], [True]))
    joined = rows[opens]
    joined[:, 2] = rows[closes, 2]
    return joined


def _window_edges(
    layout: Layout,
    rank: int,
    runs: IntArray,
    start: IntArray,
    end: IntArray,
    select: Any,
    window: int,
) -> IntArray:
    """Bands over the earlier rows that only a part of a run sees, one per run of a source."""
    assert layout.chunk_owners is not None
    first, stop = runs[select, 0], np.minimum(runs[select, 1], end[select])
    zone0 = np.maximum(start[select], first - window + 1)
    zone1 = np.minimum(first, np.maximum(zone0, stop - window))
    length = layout.chunk_length
    which, chunk = expand_ranges(zone0 // length, -(-zone1 // length))
    keep = zone1[which] > zone0[which]
    which, chunk = which[keep], chunk[keep]
    owner = layout.chunk_owners[chunk]
    if len(which) == 0:
        return np.zeros((0, 7), dtype=np.int64)
    opens = np.concatenate(([True], (np.diff(which) != 0) | (np.diff(owner) != 0)))
    closes = np.concatenate((opens[1:], [True]))
    which, owner = which[opens], owner[opens]
    k_from = np.maximum(zone0[which], chunk[opens] * length)
    k_to = np.minimum(zone1[which], (chunk[closes] + 1) * length)
    k_row = layout.rows_of(k_from)
    q_row = layout.rows_below(rank, first)[which]
    hi = window - 1 - (first[which] - k_from)
    q_len = stop[which] - first[which]
    return _rows(owner, q_row, q_row + q_len, k_row, k_row + k_to - k_from, -FAR, hi)


def _window_diagonals(
    layout: Layout, rank: int, runs: IntArray, bounds: IntArray, long: Any, window: int
) -> IntArray:
    """The causal band of each long document inside each run of the own rank."""
    low = np.searchsorted(bounds, runs[:, 0], side="right") - 1
    high = np.searchsorted(bounds, runs[:, 1], side="left")
    which, document = expand_ranges(low, high)
    which, document = which[long[document]], document[long[document]]
    first = np.maximum(runs[which, 0], bounds[document])
    last = np.minimum(runs[which, 1], bounds[document + 1])
    row = layout.rows_below(rank, first)
    return _rows(rank, row, row + last - first, row, row + last - first, 0, window - 1)
