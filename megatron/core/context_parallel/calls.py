"""Grouping attention tasks into few, large kernel calls (pure arithmetic).

Kernels of the SDPA family take a batch of equally shaped tiles. Tasks of a packed row have many
shapes and positions, so a task list becomes *calls*:

    strided   tiles of one shape whose starts grow by a constant step (batch rows with one packing,
              documents of equal length, any two tiles): a view with a batch stride, no copy
    gathered  many small tiles of one shape anywhere: rows are copied together by an index, which is
              cheaper than one kernel launch each. Small causal squares (short documents) are padded
              to few bucket lengths by repeating their own last row: below the diagonal nothing of
              the padding is visible, and a document still never touches another one's values.

Inside a call the query rows of tiles are disjoint, so results can be scattered in place; a call is
*fresh* when none of its query rows was computed by an earlier call, and then writes instead of
merging. Bands that kernels do not know are cut by ``split_band`` first.

Cost: O(tasks) numpy and little Python per micro-batch; index tensors only for small tiles. It does
not know any kernel; it holds no tensors of activations.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.context_parallel.documents import IntArray
from megatron.core.context_parallel.placing import on_device
from megatron.core.context_parallel.prefix import band_pairs, is_causal_square, is_full_band
from megatron.core.context_parallel.tasks import Task, split_band, trim_tasks

SMALL_TILE_PAIRS = 64 * 64
"""Up to this many pairs a tile is cheaper gathered than launched alone (measured on CPU)."""

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Lengths that short causal documents are padded to."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Which rows of a flat [rows, heads, D] tensor the tiles of a call use.

    Strided: tile t uses rows ``start + t * step`` onwards. Gathered: ``index`` [count * length].
    """

    length: int
    count: int
    start: int = 0
    step: int = 0
    index: Tensor | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """[count, length, ...] of a [rows, ...] tensor: a view when strided, else a copy."""
        if self.index is not None:
            picked = tensor.index_select(0, self.index)
            return picked.view(self.count, self.length, *tensor.shape[1:])
        row, *inner = tensor.stride()
        return tensor.as_strided(
            (self.count, self.length, *tensor.shape[1:]),
            (self.step * row, row, *inner),
            tensor.storage_offset() + self.start * row,
        )

    def to(self, device: torch.device) -> "Rows":
        """The same with the index on ``device``."""
        if self.index is None:
            return self
        return dataclasses.replace(self, index=on_device(self.index, device))


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """``count`` tiles of one shape and one band, run by one kernel call."""

    q: Rows
    k: Rows
    lo: int
    hi: int
    fresh: bool
    """No earlier call computed any of these query rows."""
    q_keep: Tensor | None = None
    """Padded tiles: positions in [count * q_len] that are real rows; None means all."""

    @property
    def is_full(self) -> bool:
        return bool(is_full_band(self.q.length, self.k.length, self.lo, self.hi))

    @property
    def is_causal(self) -> bool:
        return bool(is_causal_square(self.q.length, self.k.length, self.lo, self.hi))

    def to(self, device: torch.device) -> "Call":
        """The same with its index tensors on ``device``."""
        keep = None if self.q_keep is None else on_device(self.q_keep, device)
        return dataclasses.replace(self, q=self.q.to(device), k=self.k.to(device), q_keep=keep)


@dataclasses.dataclass(frozen=True, eq=False)
class CallList:
    """Calls in the order they run, and what they amount to."""

    calls: tuple[Call, ...]
    tasks: int
    pairs: int
    """Visible (query, key) pairs; times heads * 4 * D it is the forward FLOPs."""

    def to(self, device: torch.device) -> "CallList":
        """The same with index tensors on ``device``."""
        return dataclasses.replace(self, calls=tuple(call.to(device) for call in self.calls))


def make_calls(
    tasks: IntArray, visited: IntArray, *, tile: int = 256, gather: bool = True
) -> CallList:
    """Group tasks [n, 6] (flat rows, see ``tasks``) into calls.

    Args:
        tasks: q_start, q_end, k_start, k_end, lo, hi of each task, in flat rows.
        visited: bool [query rows]; rows that earlier calls computed. Updated.
        tile: rows of the masked tiles that bands are cut into.
        gather: False for kernels that take tiles anywhere by themselves.
    """
    tasks = trim_tasks(tasks)
    q0, q1, k0, k1, lo, hi = tasks.T
    pairs = int(band_pairs(q1 - q0, k1 - k0, lo, hi).sum())
    tiles = cut_bands(tasks, tile)
    order = np.lexsort((tiles[:, 2], tiles[:, 0], ~_causal(tiles)))
    calls: list[Call] = []
    rest = tiles[order]
    if gather:
        short = _causal(rest) & (rest[:, 1] - rest[:, 0] <= BUCKETS[-1])
        if short.sum() > 1:
            calls += _bucket_calls(rest[short], visited)
            rest = rest[~short]
    for group in _groups_of_one_shape(rest):
        for disjoint in disjoint_rows(group):
            calls += _calls_of_group(disjoint, visited, gather)
    return CallList(tuple(calls), len(tasks), pairs)


def cut_bands(tasks: IntArray, tile: int) -> IntArray:
    """Replace each task that is neither full nor a causal square by the pieces of its band."""
    if len(tasks) == 0:
        return tasks.reshape(0, 6)
    plain = _full(tasks) | _causal(tasks)
    pieces = [
        piece
        for row in tasks[~plain].tolist()
        for piece in split_band(Task(*row), _tile_rows(row, tile))
    ]
    if not pieces:
        return tasks
    return np.concatenate((tasks[plain], np.array(pieces, dtype=np.int64)))


def _tile_rows(task: Iterable[int], tile: int) -> int:
    """Smaller tiles for narrow bands, so that a masked tile is not mostly masked."""
    *_, lo, hi = task
    return min(tile, max(32, 1 << max(0, hi - lo).bit_length()))


def _full(tiles: IntArray) -> npt.NDArray[np.bool_]:
    q0, q1, k0, k1, lo, hi = tiles.T
    full: npt.NDArray[np.bool_] = is_full_band(q1 - q0, k1 - k0, lo, hi)
    return full


def _causal(tiles: IntArray) -> npt.NDArray[np.bool_]:
    q0, q1, k0, k1, lo, hi = tiles.T
    causal: npt.NDArray[np.bool_] = is_causal_square(q1 - q0, k1 - k0, lo, hi)
    return causal


def _groups_of_one_shape(tiles: IntArray) -> list[IntArray]:
    """Tiles grouped by (q_len, k_len, lo, hi), in order of first appearance."""
    if len(tiles) == 0:
        return []
    q0, q1, k0, k1, lo, hi = tiles.T
    shape = np.stack((q1 - q0, k1 - k0, lo, hi), axis=1)
    _, first, inverse = np.unique(shape, axis=0, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    return [tiles[inverse == which] for which in np.argsort(first)]


def disjoint_rows(group: IntArray) -> list[IntArray]:
    """Split tasks so that the query rows of each part are disjoint, in ascending order."""
    group = group[np.lexsort((group[:, 2], group[:, 0]))]
    if (group[1:, 0] >= group[:-1, 1]).all():
        return [group]
    parts: list[list[int]] = []
    ends: list[int] = []
    for index, (start, end) in enumerate(group[:, :2].tolist()):
        for part, last in enumerate(ends):
            if start >= last:
                parts[part].append(index)
                ends[part] = end
                break
        else:
            parts.append([index])
            ends.append(end)
    return [group[part] for part in parts]


def _calls_of_group(group: IntArray, visited: IntArray, gather: bool) -> list[Call]:
    """Calls of tiles that share a shape and have disjoint query rows."""
    q_len, k_len = int(group[0, 1] - group[0, 0]), int(group[0, 3] - group[0, 2])
    runs = _progressions(
        group[:, 0], group[:, 2], limit=max(2, _batch_limit(q_len, k_len, visited))
    )
    if gather and q_len * k_len <= SMALL_TILE_PAIRS and 4 * len(runs) > len(group) > 2:
        return [_gathered(group, q_len, k_len, visited)]
    calls = []
    for first, last in runs:
        count = last - first
        step_q = int(group[first + 1, 0] - group[first, 0]) if count > 1 else q_len
        step_k = int(group[first + 1, 2] - group[first, 2]) if count > 1 else k_len
        rows_q = Rows(q_len, count, int(group[first, 0]), step_q)
        rows_k = Rows(k_len, count, int(group[first, 2]), step_k)
        touched = np.concatenate([np.arange(a, b) for a, b in group[first:last, :2]])
        calls.append(_finish(rows_q, rows_k, group[first], visited, touched))
    return calls


def _batch_limit(q_len: int, k_len: int, visited: IntArray) -> int:
    """Tiles per call such that a call's own copies stay in proportion to the rows at hand."""
    return max(4 * len(visited), 8192) // (q_len + k_len)


def _progressions(q0: IntArray, k0: IntArray, limit: int) -> list[tuple[int, int]]:
    """Greedy runs [first, last) of tiles whose q and k starts both grow by constant steps."""
    runs = []
    first, total = 0, len(q0)
    step_q, step_k = np.diff(q0).tolist(), np.diff(k0).tolist()
    while first < total:
        last = first + 1
        if last < total and step_k[first] >= 0:
            last += 1
            while (
                last < total
                and last - first < limit
                and step_q[last - 1] == step_q[first]
                and step_k[last - 1] == step_k[first]
            ):
                last += 1
        runs.append((first, last))
        first = last
    return runs


def _gathered(group: IntArray, q_len: int, k_len: int, visited: IntArray) -> Call:
    """One call over tiles anywhere."""
    q_index = (group[:, 0, None] + np.arange(q_len)).reshape(-1)
    k_index = (group[:, 2, None] + np.arange(k_len)).reshape(-1)
    rows_q = Rows(q_len, len(group), index=torch.from_numpy(q_index))
    rows_k = Rows(k_len, len(group), index=torch.from_numpy(k_index))
    return _finish(rows_q, rows_k, group[0], visited, q_index)


def _bucket_calls(squares: IntArray, visited: IntArray) -> list[Call]:
    """Calls of short causal squares, padded to the next bucket length."""
    length = squares[:, 1] - squares[:, 0]
    bucket = np.array(BUCKETS)[np.searchsorted(BUCKETS, length)]
    calls = []
    for size in np.unique(bucket).tolist():
        for group in disjoint_rows(squares[bucket == size]):
            real = (group[:, 1] - group[:, 0])[:, None]
            offset = np.minimum(np.arange(size)[None], real - 1)
            q_index = (group[:, 0, None] + offset).reshape(-1)
            k_index = (group[:, 2, None] + offset).reshape(-1)
            keep = np.flatnonzero((np.arange(size)[None] < real).reshape(-1))
            rows_q = Rows(size, len(group), index=torch.from_numpy(q_index))
            rows_k = Rows(size, len(group), index=torch.from_numpy(k_index))
            shape = np.array([0, size, 0, size, 0, size - 1])
            padded = None if len(keep) == len(q_index) else torch.from_numpy(keep)
            calls.append(_finish(rows_q, rows_k, shape, visited, q_index, padded))
    return calls


def _finish(
    q: Rows,
    k: Rows,
    tile: IntArray,
    visited: IntArray,
    touched: IntArray,
    keep: Tensor | None = None,
) -> Call:
    """The call, after noting its rows as visited."""
    fresh = not visited[touched].any()
    visited[touched] = True
    return Call(q, k, int(tile[4]), int(tile[5]), fresh, keep)
