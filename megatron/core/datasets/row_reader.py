"""Reading one rank's share of a row: tokens, labels and positions at the rank's positions.

A share is a few runs of consecutive positions (contiguous, zigzag, balanced) or is scattered
(striped). Runs are cut at the borders of pieces and copied as slices of the memory map;
scattered positions are gathered. Either way the work is the share plus the pieces it touches:
no tensor of the whole row is made. A label is the next token of the DOCUMENT, wherever it
lies: in the next run, on another rank, in another row; a document's last token has none.

Cost: about 10 ns a token in runs, 40 ns scattered, plus 1 us a piece.
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

    def read(
        self, pieces: Fragments, share: Share, seq_length: int
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(tokens, labels, position ids), each int64 [s], of one row.

        Raises:
            DatasetError: on a token id outside the vocabulary.
        """
        bounds = np.zeros(len(pieces) + 2, dtype=np.int64)
        np.cumsum(pieces.length, out=bounds[1:-1])
        bounds[-1] = seq_length  # the last interval is padding, perhaps empty
        if share.scattered:
            tokens, labels, owner = self._gather(pieces, bounds, share)
            firsts = bounds[owner]
        else:
            tokens, labels, owner, lengths = self._slices(pieces, bounds, share)
            firsts = np.repeat(bounds[owner], lengths)
        if not self._reset_position_ids:
            return tokens, labels, share.positions
        return tokens, labels, share.positions - firsts

    def _slices(
        self, pieces: Fragments, bounds: Int64Array, share: Share
    ) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Tokens, labels; owner and length of each part (a run's cut with a piece)."""
        low = np.searchsorted(bounds[:-1], share.run_begins, "right") - 1
        high = np.searchsorted(bounds[:-1], share.run_ends - 1, "right") - 1
        counts = high - low + 1
        run = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
        owner = low[run] + nth
        begins = np.maximum(share.run_begins[run], bounds[owner])
        ends = np.minimum(share.run_ends[run], bounds[owner + 1])
        lengths = ends - begins
        at, corpus = self._addresses(pieces, bounds, owner, begins)
        tokens = np.empty(len(share.positions), dtype=np.int64)
        np.concatenate(
            [
                self._corpora[c].read(a, a + n) if c >= 0 else self._padding(n)
                for c, a, n in zip(corpus.tolist(), at.tolist(), lengths.tolist())
            ],
            out=tokens,
        )
        labels = np.empty_like(tokens)
        labels[:-1] = tokens[1:]
        # The shift is wrong at the end of each part; padding has no labels at all.
        lasts = np.cumsum(lengths) - 1
        labels[lasts] = self._next_tokens(pieces, bounds, owner, ends - 1, at + lengths)
        for part in np.flatnonzero(corpus < 0):
            labels[lasts[part] + 1 - lengths[part] : lasts[part] + 1] = IGNORE_INDEX
        self._check(pieces, bounds, share, tokens, labels)
        return tokens, labels, owner, lengths

    def _gather(
        self, pieces: Fragments, bounds: Int64Array, share: Share
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Tokens, labels and owner of each position."""
        owner = np.searchsorted(bounds[:-1], share.positions, "right") - 1
        at, corpus = self._addresses(pieces, bounds, owner, share.positions)
        tokens = self._take(corpus, at, self._pad_token)
        labels = self._next_tokens(pieces, bounds, owner, share.positions, at + 1)
        self._check(pieces, bounds, share, tokens, labels)
        return tokens, labels, owner

    def _addresses(
        self, pieces: Fragments, bounds: Int64Array, owner: Int64Array, positions: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Index in its corpus, and the corpus (-1: padding), of positions in known pieces."""
        bases = np.zeros(len(pieces) + 1, dtype=np.int64)
        corpus = np.append(pieces.corpus, -1)
        touched = np.zeros(len(bases), dtype=np.bool_)
        touched[owner] = True
        touched[-1] = False
        for number in np.unique(corpus[touched]).tolist():
            mine = np.flatnonzero(touched & (corpus == number))
            starts = self._corpora[number].document_starts(pieces.document[mine])
            bases[mine] = starts + pieces.start[mine]
        return bases[owner] + positions - bounds[owner], corpus[owner]

    def _next_tokens(
        self,
        pieces: Fragments,
        bounds: Int64Array,
        owner: Int64Array,
        positions: Int64Array,
        at: Int64Array,
    ) -> Int64Array:
        """Tokens at ``at``, those after ``positions``; IGNORE_INDEX after a document's last."""
        corpus = np.append(pieces.corpus, -1)
        ends_document = np.append(pieces.ends_document, True)
        last = ends_document[owner] & (positions == bounds[owner + 1] - 1)
        return self._take(np.where(last, -1, corpus[owner]), at, IGNORE_INDEX)

    def _take(self, corpus: Int64Array, at: Int64Array, otherwise: int) -> Int64Array:
        """Tokens at indices in their corpora; ``otherwise`` where the corpus is -1."""
        taken = np.full(len(at), otherwise, dtype=np.int64)
        for number in np.unique(corpus).tolist():
            if number >= 0:
                mine = corpus == number
                taken[mine] = self._corpora[number].take(at[mine])
        return taken

    def _padding(self, length: int) -> npt.NDArray[Any]:
        return np.full(length, self._pad_token, dtype=np.int64)

    def _check(
        self,
        pieces: Fragments,
        bounds: Int64Array,
        share: Share,
        tokens: Int64Array,
        labels: Int64Array,
    ) -> None:
        """Every id must be in the vocabulary (a label is also some share's token)."""
        limit = self._vocab_size
        if limit is None or not len(tokens):
            return
        if int(tokens.min()) >= 0 and int(tokens.max()) < limit > int(labels.max()):
            return
        wrong, shift, ids = (tokens < 0) | (tokens >= limit), 0, tokens
        if not wrong.any():
            wrong, shift, ids = labels >= limit, 1, labels
        place = int(np.argmax(wrong))
        position = int(share.positions[place])
        piece = int(np.searchsorted(bounds[:-1], position, "right")) - 1
        offset = int(pieces.start[piece]) + position - int(bounds[piece]) + shift
        raise DatasetError(
            f"{self._corpora[int(pieces.corpus[piece])].name}: token {offset} of document "
            f"{pieces.document[piece]} is id {ids[place]}, outside the vocabulary of {limit}: "
            f"the corpus was made with another tokenizer, or --vocab-size is too small"
        )
