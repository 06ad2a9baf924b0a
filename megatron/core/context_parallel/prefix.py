"""Bands in closed form: what a band is, its visible pairs, those of all rows before a position.

A band of a rectangle shows the pairs (i, j), 0 <= i < q_len and 0 <= j < k_len, with
lo <= i - j <= hi. Everything takes numbers or int64 arrays. Cost: a few operations an element; no
pair is ever enumerated.
"""

from typing import Any

import numpy as np

from megatron.core.context_parallel.documents import IntArray


def is_full_band(q_len: Any, k_len: Any, lo: Any, hi: Any) -> Any:
    """Whether every pair of the rectangle is visible."""
    return (lo <= 1 - k_len) & (hi >= q_len - 1)


def is_causal_square(q_len: Any, k_len: Any, lo: Any, hi: Any) -> Any:
    """Whether it is a square with i >= j visible: causal, however a kernel aligns it."""
    return (lo == 0) & (q_len == k_len) & (hi >= q_len - 1)


def band_pairs(q_len: Any, k_len: Any, lo: Any, hi: Any) -> Any:
    """Number of visible pairs."""
    return _pairs_from(q_len, k_len, lo) - _pairs_from(q_len, k_len, hi + 1)


def _pairs_from(q_len: Any, k_len: Any, low: Any) -> Any:
    """Pairs with i - j >= low, by inclusion and exclusion of triangles."""
    low = np.clip(low, 1 - k_len, q_len)
    return (
        _triangle(q_len - low)
        - _triangle(q_len - low - k_len)
        - _triangle(-low)
        + _triangle(-low - k_len)
    )


def _triangle(n: Any) -> Any:
    n = np.maximum(n, 0)
    return n * (n + 1) // 2


def visible_before(
    bounds: IntArray, positions: IntArray, window: int | None = None, causal: bool = True
) -> IntArray:
    """Visible pairs of all query rows in front of each global position (0..seq_length).

    Differences give the attention work of any run of queries; the value at seq_length is the
    work of the whole row.
    """
    length = np.diff(bounds)
    index = np.minimum(np.searchsorted(bounds, positions, side="right"), len(length)) - 1
    depth = positions - bounds[index]
    if causal:
        reach = np.iinfo(np.int64).max if window is None else window
        whole, part = _rows_seen(length, reach), _rows_seen(depth, reach)
    else:
        whole, part = length * length, depth * length[index]
    before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(whole)))
    return before[index] + part


def _rows_seen(rows: IntArray, reach: int) -> IntArray:
    """Sum over the first rows of a document of min(row + 1, reach)."""
    short = np.minimum(rows, reach)
    return short * (short + 1) // 2 + (rows - short) * (reach if reach < 1 << 62 else 0)


def expand_ranges(low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
    """(index, value) of every value in each half-open range [low, high)."""
    count = np.maximum(0, high - low)
    index = np.repeat(np.arange(len(low)), count)
    offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return index, low[index] + offset
