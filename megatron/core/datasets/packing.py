"""Which pieces of documents fill which rows. Pure: lengths in, pieces out.

``concat`` lays documents end to end and cuts at row ends: no padding, order kept.

``best-fit`` never cuts a document that fits a row ("Fewer Truncations Improve Language
Modeling", Ding et al., 2024), and looks only at a bounded window of what comes:

    window (oldest first)   [ A | B | C | D | ... ]     a row of S tokens
    1. take the oldest in order while they fit           A B . . .
    2. fill the hole with the longest piece that fits    A B . K . , then again
    3. what stays free is padding                        A B . K n x

Step 1 keeps rows an unbiased sample of the stream (taking the longest first would put long
documents early) and bounds how long a document waits. A document longer than a row gives
pieces of S from its front, a row each; what remains over full rows may fill a hole before.

Both carry only unconsumed pieces from call to call, so nothing depends on how many rows a call
asks for, and the next call may have another ``seq_length`` or the other packing.

Cost: concat about 0.1 us a document. best-fit 30 to 80 us a row of 8K to 128K tokens.
"""

from typing import Protocol

import numpy as np

from megatron.core.datasets.fragments import Fragments, PackedRows
from megatron.core.datasets.index_format import DatasetError, Int64Array

BEST_FIT_WINDOW = 1024
"""Documents that best-fit looks ahead."""
PACKINGS = ("concat", "best-fit")

_NEVER = np.int64(2**62)
_CHUNK = 1 << 13
_TOKENS_AT_ONCE = 1 << 25


class Documents(Protocol):
    """A forward reader of whole documents."""

    def upcoming(self, count: int) -> Fragments:
        """The next ``count``, without moving."""
        ...

    def advance(self, count: int) -> None:
        """Move past ``count``."""
        ...


def pack_rows(
    packing: str,
    documents: Documents,
    pending: Fragments,
    *,
    num_rows: int,
    seq_length: int,
    window: int = BEST_FIT_WINDOW,
) -> tuple[PackedRows, Fragments]:
    """Fill ``num_rows`` rows, first from ``pending``, then from the stream.

    ``window`` is how many documents best-fit looks ahead.

    Returns:
        The rows, and the pieces that must come first in the next call.

    Raises:
        DatasetError: if there is no such packing.
    """
    if packing == "concat":
        return pack_concat(documents, pending, num_rows=num_rows, seq_length=seq_length)
    if packing == "best-fit":
        return pack_best_fit(
            documents, pending, num_rows=num_rows, seq_length=seq_length, window=window
        )
    raise DatasetError(f"--packing {packing} must be one of {', '.join(PACKINGS)}")


def pack_concat(
    documents: Documents, pending: Fragments, *, num_rows: int, seq_length: int
) -> tuple[PackedRows, Fragments]:
    """See the module. Every row is full."""
    at_once = max(1, _TOKENS_AT_ONCE // seq_length)
    parts = []
    for first in range(0, num_rows, at_once):
        rows = min(at_once, num_rows - first)
        part, pending = _concat_some(documents, pending, rows, seq_length)
        parts.append(part)
    bounds = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.concatenate([np.diff(part.row_bounds) for part in parts]), out=bounds[1:])
    pieces = Fragments.concatenate([part.pieces for part in parts])
    return PackedRows(pieces, bounds, seq_length), pending


def _concat_some(
    documents: Documents, pending: Fragments, num_rows: int, seq_length: int
) -> tuple[PackedRows, Fragments]:
    """``pack_concat`` of a number of rows that is good to handle at once."""
    need = num_rows * seq_length
    queue = _at_least(documents, pending, need)
    ends = np.cumsum(queue.length)
    used = int(np.searchsorted(ends, need, "left")) + 1
    ends = ends[:used]
    begins = ends - queue.length[:used]
    cuts = np.arange(0, need, seq_length, dtype=np.int64)
    # A piece begins where a document or a row does.
    edges = np.concatenate((begins, cuts))
    edges.sort(kind="stable")  # two sorted runs: a merge
    piece_begins = edges[np.append(np.diff(edges) > 0, True)]
    piece_ends = np.append(piece_begins[1:], need)
    owner = np.searchsorted(ends, piece_begins, "right")
    pieces = Fragments(
        queue.corpus[owner],
        queue.document[owner],
        queue.start[owner] + piece_begins - begins[owner],
        piece_ends - piece_begins,
        queue.ends_document[owner] & (piece_ends == ends[owner]),
    )
    bounds = np.searchsorted(piece_begins, np.append(cuts, need)).astype(np.int64)
    left = queue[slice(used, max(used, len(pending)))]
    over = int(ends[-1]) - need
    if over:
        cut = _shortened(queue[slice(used - 1, used)], over)
        left = Fragments.concatenate([cut, left])
    documents.advance(max(0, used - len(pending)))
    return PackedRows(pieces, bounds, seq_length), left


def _at_least(documents: Documents, pending: Fragments, need: int) -> Fragments:
    """Pending pieces and as many documents as hold ``need`` tokens together."""
    have = int(pending.length.sum())
    if have >= need:
        return pending
    count = 64
    while True:
        fresh = documents.upcoming(count)
        got = int(fresh.length.sum())
        if have + got >= need:
            return Fragments.concatenate([pending, fresh])
        guess = int((need - have) * count / got * 1.05) + 16
        count = min(max(guess, 2 * count), 64 * count)


def _shortened(fragment: Fragments, length: int) -> Fragments:
    """The last ``length`` tokens of one fragment."""
    start = fragment.start + fragment.length - length
    return Fragments(
        fragment.corpus,
        fragment.document,
        start,
        np.array([length], dtype=np.int64),
        fragment.ends_document,
    )


def pack_best_fit(
    documents: Documents,
    pending: Fragments,
    *,
    num_rows: int,
    seq_length: int,
    window: int = BEST_FIT_WINDOW,
) -> tuple[PackedRows, Fragments]:
    """See the module. Rows may end in padding."""
    feed = _Feed(documents, pending)
    bench = _Window(feed, seq_length, window)
    for _ in range(num_rows):
        bench.fill_row()
    return bench.packed(), Fragments.concatenate([bench.rest(), feed.finish()])


class _Feed:
    """Pending pieces, then the stream; moves the stream past just what was taken."""

    def __init__(self, documents: Documents, pending: Fragments) -> None:
        self._documents = documents
        self._chunk, self._used, self._is_pending = pending, 0, True

    def take(self, count: int) -> Fragments:
        """The next ``count`` pieces."""
        parts = []
        while count:
            if self._used == len(self._chunk):
                self._next_chunk(count)
            part = self._chunk[slice(self._used, self._used + count)]
            self._used += len(part)
            count -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else Fragments.concatenate(parts)

    def finish(self) -> Fragments:
        """Pending pieces that were not taken."""
        if self._is_pending:
            return self._chunk[slice(self._used, None)]
        self._documents.advance(self._used)
        self._used, self._chunk = 0, Fragments.empty()
        return Fragments.empty()

    def _next_chunk(self, count: int) -> None:
        if not self._is_pending:
            self._documents.advance(self._used)
        self._is_pending = False
        self._chunk, self._used = self._documents.upcoming(max(count, _CHUNK)), 0


class _Window:
    """The window's pieces, oldest first, in arrays with room to append.

    ``left`` is what is left of a piece, 0 once it is used up. ``fit`` is what of it may fill a
    hole: all of a piece shorter than the row; of a longer one what is over full rows. ``taken``
    collects (place in the arrays, start, length, ends its document) of what rows take.
    """

    def __init__(self, feed: _Feed, seq_length: int, window: int) -> None:
        self._feed, self._seq_length, self._size = feed, seq_length, window
        capacity = 4 * window
        self._corpus, self._document, self._start, self._left, self._fit = (
            np.zeros(capacity, dtype=np.int64) for _ in range(5)
        )
        self._ends = np.zeros(capacity, dtype=np.bool_)
        self._head = self._tail = self._alive = 0
        self._taken: list[list[int]] = [[], [], [], []]
        self._packed: list[Fragments] = []
        self._bounds, self._flushed = [0], 0

    def fill_row(self) -> None:
        """Take the pieces of the next row."""
        self._refill()
        region = slice(self._head, self._tail)
        ends = self._left[region].cumsum()
        count = int(ends.searchsorted(self._seq_length, "right"))
        if count:
            self._take_whole(self._left[region][:count].nonzero()[0] + self._head)
            self._fill_hole(self._seq_length - int(ends[count - 1]), self._fit[region])
        else:  # the oldest is longer than the row: a full row from its front
            self._record(self._head, int(self._start[self._head]), self._seq_length, False)
            self._start[self._head] += self._seq_length
            self._left[self._head] -= self._seq_length
        self._bounds.append(self._flushed + len(self._taken[0]))

    def packed(self) -> PackedRows:
        """All rows so far."""
        self._flush()
        bounds = np.array(self._bounds, dtype=np.int64)
        return PackedRows(Fragments.concatenate(self._packed), bounds, self._seq_length)

    def rest(self) -> Fragments:
        """What of the window is not used up."""
        live = np.flatnonzero(self._left[: self._tail])
        return Fragments(
            self._corpus[live],
            self._document[live],
            self._start[live],
            self._left[live],
            self._ends[live],
        )

    def _take_whole(self, at: Int64Array) -> None:
        for record, values in zip(
            self._taken, (at, self._start[at], self._left[at], self._ends[at])
        ):
            record.extend(values.tolist())
        self._left[at] = 0
        self._fit[at] = _NEVER
        self._alive -= len(at)

    def _fill_hole(self, room: int, fit: Int64Array) -> None:
        """Fill ``room`` tokens with the longest pieces that fit, the oldest of equals first."""
        while room:
            place = int(np.where(fit <= room, fit, 0).argmax())
            length = int(fit[place])
            if length > room:
                break
            at = place + self._head
            left = int(self._left[at]) - length
            self._record(at, int(self._start[at]) + left, length, bool(self._ends[at]))
            self._left[at], self._ends[at], fit[place] = left, False, _NEVER
            self._alive -= not left
            room -= length

    def _record(self, at: int, start: int, length: int, ends_document: bool) -> None:
        for record, value in zip(self._taken, (at, start, length, ends_document)):
            record.append(value)

    def _refill(self) -> None:
        """Bring the number of live pieces back to the window's size."""
        while self._head < self._tail and not self._left[self._head]:
            self._head += 1
        missing = self._size - self._alive
        if missing <= 0:
            return
        if self._tail + missing > len(self._left):
            self._compact()
        fresh = self._feed.take(missing)
        into = slice(self._tail, self._tail + missing)
        self._corpus[into], self._document[into] = fresh.corpus, fresh.document
        self._start[into], self._ends[into] = fresh.start, fresh.ends_document
        self._left[into] = fresh.length
        fit = np.where(
            fresh.length < self._seq_length, fresh.length, fresh.length % self._seq_length
        )
        self._fit[into] = np.where(fit > 0, fit, _NEVER)
        self._tail += missing
        self._alive += missing

    def _compact(self) -> None:
        """Move the live pieces to the front of the arrays."""
        self._flush()
        live = np.flatnonzero(self._left[: self._tail])
        for array in (self._corpus, self._document, self._start, self._left, self._fit):
            array[: len(live)] = array[live]
        self._ends[: len(live)] = self._ends[live]
        self._left[len(live) :] = 0
        self._head, self._tail = 0, len(live)

    def _flush(self) -> None:
        """Turn what was taken into fragments, before places in the arrays change."""
        at, start, length = (np.array(values, dtype=np.int64) for values in self._taken[:3])
        ends = np.array(self._taken[3], dtype=np.bool_)
        self._packed.append(Fragments(self._corpus[at], self._document[at], start, length, ends))
        self._flushed += len(at)
        for values in self._taken:
            values.clear()
