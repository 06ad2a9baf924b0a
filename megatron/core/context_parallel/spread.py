"""Spreading a rank's own tasks over the steps of a schedule (pure arithmetic).

Ranks of an exchange do equal work in total but unequal work on own keys. Were all own keys done
first, a rank with many would post its later transfers late and let the others wait for data. So own
work fills up each step to the same share of the total, and all ranks reach a transfer at about the
same time. Large tasks are cut for that, causal squares into squares and rectangles::

    rows < x:    causal square                rows >= x:   rectangle of x columns, causal square

Cost: O(tasks) Python. It says nothing of what the steps are.
"""

from collections.abc import Sequence

import numpy as np

from megatron.core.context_parallel.documents import IntArray
from megatron.core.context_parallel.prefix import band_pairs, is_causal_square, is_full_band
from megatron.core.context_parallel.tasks import trim_tasks

CUT_ROWS = 256
"""A task is cut only where both sides keep at least so many rows."""

Row = tuple[int, int, int, int, int, int]


def fill_steps(own_pairs: int, fixed: Sequence[int]) -> list[float]:
    """Own work for each step such that own + fixed work is as even as it can be.

    Args:
        own_pairs: own work to give out.
        fixed: work that each step has anyway.
    """
    left, level = float(own_pairs), 0.0
    heights = sorted(fixed)
    for count in range(1, len(heights) + 1):  # pour water into uneven columns
        above = heights[count] if count < len(heights) else float("inf")
        level = (sum(heights[:count]) + left) / count
        if level <= above:
            break
    return [max(0.0, level - height) for height in fixed]


def spread_tasks(tasks: IntArray, shares: Sequence[float]) -> list[IntArray]:
    """Give out tasks [n, 6] in order, about ``shares[i]`` pairs to part i, the rest to the last."""
    waiting: list[Row] = [tuple(row) for row in reversed(trim_tasks(tasks).tolist())]
    parts: list[list[Row]] = [[] for _ in shares]
    part, room = 0, shares[0]
    while waiting:
        row = waiting.pop()
        pairs = _pairs(row)
        last = part == len(parts) - 1
        if not last and room < pairs:
            pieces = _cut(row, room)
            if pieces is not None:
                waiting.extend(reversed(pieces[1:]))
                row = pieces[0]
                pairs = _pairs(row)
            elif 2 * room < pairs:  # nearer to the share without it
                waiting.append(row)
                part, room = part + 1, shares[part + 1]
                continue
        parts[part].append(row)
        room -= pairs
        while room <= 0 and part < len(parts) - 1:
            part += 1
            room = shares[part]
    return [np.array(rows, dtype=np.int64).reshape(-1, 6) for rows in parts]


def _pairs(row: Row) -> int:
    q0, q1, k0, k1, lo, hi = row
    return int(band_pairs(q1 - q0, k1 - k0, lo, hi))


def _cut(row: Row, pairs: float) -> list[Row] | None:
    """Pieces of a full or causal task, the first with about so many pairs; None if not worth it."""
    q0, q1, k0, k1, lo, hi = row
    q_len, k_len = q1 - q0, k1 - k0
    causal = is_causal_square(q_len, k_len, lo, hi)
    full = is_full_band(q_len, k_len, lo, hi)
    if not (causal or full):
        return None
    rows = int((2 * max(pairs, 0.0)) ** 0.5) if causal else int(pairs / k_len)
    rows = rows // CUT_ROWS * CUT_ROWS
    if rows < CUT_ROWS or q_len - rows < CUT_ROWS:
        return None
    rest = q_len - rows
    if full:
        return [(q0, q0 + rows, k0, k1, lo, rows - 1), (q0 + rows, q1, k0, k1, lo, rest - 1)]
    return [
        (q0, q0 + rows, k0, k0 + rows, 0, rows - 1),
        (q0 + rows, q1, k0, k0 + rows, 1 - rows, rest - 1),
        (q0 + rows, q1, k0 + rows, k1, 0, rest - 1),
    ]
