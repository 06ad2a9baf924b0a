"""Reading one rank's share of a row: tokens, labels and positions at the rank's positions.

A share is a few runs of consecutive positions (contiguous, zigzag, balanced) or is scattered
(striped). Runs are cut at the borders of pieces and copied as slices of the memory map;
scattered positions are gathered. Either way the work is the share plus the pieces it touches:
no tensor of the whole row is made. A label is the next token of the DOCUMENT, wherever it
lies: in the next run, on another rank, in another row; a document's last token has none.

Cost: about 5 ns a token in runs, 40 ns scattered, plus 1 us a piece.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.corpus import Corpus
from megatron.core.datasets.fragments import Fragments
from megatron.core.datasets.index_format import DatasetError, Int64Array
from megatron.core.packed_batch import IGNORE_INDEX

_SCATTERED = 16
"""Runs shorter than this on average are gathered instead of sliced."""


@dataclasses.dataclass(frozen=True)
class Share:
    """The positions of a row that a rank holds, in local order, and their runs."""

    positions: Int64Array
    run_begins: Int64Array
    """[runs]: first position of each run."""
    run_ends: Int64Array
    """[runs]: one past its last."""

    @staticmethod
    def of(positions: npt.NDArray[Any]) -> "Share":
        """Find the runs of consecutive positions."""
        wide = np.ascontiguousarray(positions, dtype=np.int64)
        breaks = np.flatnonzero(np.diff(wide) != 1) + 1
        first = np.concatenate(([0], breaks)).astype(np.int64)
        last = np.append(breaks, len(wide)).astype(np.int64) - 1
        return Share(wide, wide[first], wide[last] + 1)

    @property
    def scattered(self) -> bool:
        """Whether there are too many runs to copy them one by one."""
        return len(self.positions) < _SCATTERED * len(self.run_begins)


class RowReader:
    """Reads shares of rows.

    Args:
        corpora: the table that pieces refer to.
        vocab_size: ids must be below it.
        pad_token: what fills a row's end.
        reset_position_ids: positions begin at 0 in each piece, not only in each row.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        *,
        vocab_size: int | None = None,
        pad_token: int = 0,
        reset_position_ids: bool = True,
    ) -> None:
        self._corpora = corpora
        self._vocab_size, self._pad_token = vocab_size, pad_token
        self._reset_position_ids = reset_position_ids
        self._numbers = np.empty(0, dtype=np.int64)

    def read(self, pieces: Fragments, share: Share, seq_length: int) -> Int64Array:
        """int64 [3, s]: tokens, labels and position ids of one row.

        Raises:
            DatasetError: on a token id outside the vocabulary.
        """
        result = np.empty((3, len(share.positions)), dtype=np.int64)
        self.read_into(pieces, share, seq_length, tuple(result))
        return result

    def read_into(
        self, pieces: Fragments, share: Share, seq_length: int, out: Sequence[Int64Array]
    ) -> None:
        """``read`` into three arrays [s]."""
        row = _Row(pieces, self._corpora, seq_length)
        reset = self._reset_position_ids
        if share.scattered:
            self._gather(row, share, out, reset)
        else:
            self._slices(row, share, out, reset)
        if not reset:
            out[2][:] = share.positions

    def _slices(self, row: "_Row", share: Share, out: Sequence[Int64Array], reset: bool) -> None:
        """Copy part by part; a part is a run's cut with a piece (or with the padding)."""
        tokens, labels, positions = out
        begins, ends, owner = row.parts(share)
        lengths = ends - begins
        lasts = lengths.cumsum() - 1
        base = row.bases[owner]
        spans = zip(row.corpus[owner].tolist(), (begins + base).tolist(), (ends + base).tolist())
        raw = np.concatenate(
            [
                self._corpora[c].read(a, b) if c >= 0 else np.full(b - a, self._pad_token)
                for c, a, b in spans
            ]
        )
        tokens[:] = raw
        # The next token lies one place on, but for the ends of parts.
        labels[:-1] = raw[1:]
        labels[lasts] = IGNORE_INDEX
        goes_on = (~row.ends_document[owner] | (ends < row.bounds[owner + 1])).nonzero()[0]
        goes_on = goes_on[owner[goes_on] < row.padding]
        if len(goes_on):
            following = self._take(row.corpus[owner[goes_on]], (ends + base)[goes_on], 0)
            self._check(row, share, following, 1, lasts[goes_on])
            labels[lasts[goes_on]] = following
        if owner.max() == row.padding:
            for part in np.flatnonzero(owner == row.padding):
                labels[lasts[part] + 1 - lengths[part] : lasts[part] + 1] = IGNORE_INDEX
        if reset:
            numbers = self._count_up(int(row.bounds[-1]))
            offsets = zip((begins - row.bounds[owner]).tolist(), lengths.tolist())
            np.concatenate([numbers[a : a + n] for a, n in offsets], out=positions)
        self._check(row, share, raw, 0)

    def _count_up(self, seq_length: int) -> Int64Array:
        """0, 1, 2, ... to copy positions from."""
        if len(self._numbers) < seq_length:
            self._numbers = np.arange(seq_length, dtype=np.int64)
        return self._numbers

    def _gather(self, row: "_Row", share: Share, out: Sequence[Int64Array], reset: bool) -> None:
        """Look up each position by itself."""
        tokens, labels, positions = out
        at = share.positions
        owner = np.searchsorted(row.bounds[:-1], at, "right") - 1
        corpus, where = row.corpus[owner], at + row.bases[owner]
        tokens[:] = self._take(corpus, where, self._pad_token)
        last = row.ends_document[owner] & (at == row.bounds[owner + 1] - 1)
        labels[:] = self._take(np.where(last, -1, corpus), where + 1, IGNORE_INDEX)
        if reset:
            np.subtract(at, row.bounds[owner], out=positions)
        self._check(row, share, tokens, 0)
        self._check(row, share, labels, 1)

    def _take(self, corpus: Int64Array, at: Int64Array, otherwise: int) -> Int64Array:
        """Tokens at indices in their corpora; ``otherwise`` where the corpus is -1."""
        taken = np.full(len(at), otherwise, dtype=np.int64)
        for number in set(corpus.tolist()) if len(corpus) < 64 else np.unique(corpus).tolist():
            if number >= 0:
                mine = corpus == number
                taken[mine] = self._corpora[number].take(at[mine])
        return taken

    def _check(
        self,
        row: "_Row",
        share: Share,
        ids: npt.NDArray[Any],
        shift: int,
        places: Int64Array | None = None,
    ) -> None:
        """Ids must be in the vocabulary; ``ids[i]`` is ``shift`` tokens after its position."""
        limit = self._vocab_size
        if limit is None or not len(ids):
            return
        if ids.max() < limit and (shift or ids.dtype.kind == "u" or ids.min() >= 0):
            return
        bad = int(np.argmax((ids >= limit) | (ids < 0) & (not shift)))
        place = bad if places is None else int(places[bad])
        where = row.describe(int(share.positions[place]), shift)
        raise DatasetError(
            f"{where} is id {ids[bad]}, outside the vocabulary of {limit}: the corpus was made "
            f"with another tokenizer, or --vocab-size is too small"
        )


class _Row:
    """A row's pieces, the padding as one more, and where in their corpora they lie."""

    def __init__(self, pieces: Fragments, corpora: Sequence[Corpus], seq_length: int) -> None:
        count = len(pieces)
        self.pieces, self.corpora = pieces, corpora
        self.padding = count
        """Number of the padding, if there is any."""
        self.bounds = np.empty(count + 2, dtype=np.int64)
        """Piece i has positions ``bounds[i] .. bounds[i + 1] - 1``."""
        self.bounds[0], self.bounds[-1] = 0, seq_length
        pieces.length.cumsum(out=self.bounds[1:-1])
        self.corpus = np.empty(count + 1, dtype=np.int64)
        """Number of each piece's corpus; -1: padding."""
        self.corpus[:-1], self.corpus[-1] = pieces.corpus, -1
        self.ends_document = np.empty(count + 1, dtype=np.bool_)
        self.ends_document[:-1], self.ends_document[-1] = pieces.ends_document, True
        self.bases = np.zeros(count + 1, dtype=np.int64)
        """Add a position to get an index in the corpus."""
        self.bases[:-1] = self._starts() + pieces.start - self.bounds[:-2]

    def _starts(self) -> Int64Array:
        """Where the documents of the pieces start in their corpora."""
        document, corpus = self.pieces.document, self.pieces.corpus
        if len(corpus) and (corpus == corpus[0]).all():
            return self.corpora[int(corpus[0])].document_starts(document)
        starts = np.empty_like(document)
        for number in np.unique(corpus).tolist():
            mine = corpus == number
            starts[mine] = self.corpora[number].document_starts(document[mine])
        return starts

    def parts(self, share: Share) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Runs cut at the borders of pieces: first position, one past the last, piece."""
        if len(share.run_begins) == 1:
            begin, end = int(share.run_begins[0]), int(share.run_ends[0])
            first, last = self.bounds[:-1].searchsorted((begin, end - 1), "right").tolist()
            begins = self.bounds[first - 1 : last].copy()
            ends = self.bounds[first : last + 1].copy()
            begins[0], ends[-1] = begin, end
            return begins, ends, np.arange(first - 1, last)
        low = self.bounds[:-1].searchsorted(share.run_begins, "right") - 1
        high = self.bounds[:-1].searchsorted(share.run_ends - 1, "right") - 1
        counts = high - low + 1
        first_part = counts.cumsum() - counts
        owner = np.arange(int(counts.sum())) + np.repeat(low - first_part, counts)
        begins, ends = self.bounds[owner], self.bounds[owner + 1]
        begins[first_part] = share.run_begins
        ends[first_part + counts - 1] = share.run_ends
        return begins, ends, owner

    def describe(self, position: int, shift: int) -> str:
        """The token ``shift`` places after a position of the row, in words."""
        piece = int(np.searchsorted(self.bounds[:-1], position, "right")) - 1
        offset = int(self.pieces.start[piece]) + position - int(self.bounds[piece]) + shift
        name = self.corpora[int(self.pieces.corpus[piece])].name
        return f"{name}: token {offset} of document {self.pieces.document[piece]}"
