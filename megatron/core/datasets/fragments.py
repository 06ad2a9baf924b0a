"""Pieces of documents as a struct of arrays: what waits to be packed, and what fills rows."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.index_format import Int64Array


@dataclasses.dataclass(frozen=True)
class Fragments:
    """Pieces of documents, in order; whole documents at first."""

    corpus: Int64Array
    """[n]: number of the corpus in the table of corpora."""
    document: Int64Array
    """[n]: document in that corpus."""
    start: Int64Array
    """[n]: first token, counted in the document."""
    length: Int64Array
    """[n]: tokens; > 0."""
    ends_document: npt.NDArray[np.bool_]
    """[n]: the last token is its document's last (else the document goes on elsewhere)."""

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, which: slice | npt.NDArray[Any]) -> "Fragments":
        return Fragments(*(getattr(self, name)[which] for name in _FIELDS))

    @staticmethod
    def empty() -> "Fragments":
        """No fragments."""
        nothing = np.empty(0, dtype=np.int64)
        return Fragments(nothing, nothing, nothing, nothing, nothing.astype(np.bool_))

    @staticmethod
    def concatenate(parts: list["Fragments"]) -> "Fragments":
        """All of them, in order."""
        return Fragments(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS)
        )


_FIELDS = tuple(field.name for field in dataclasses.fields(Fragments))


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Which pieces fill which rows; a row's pieces lie in order and begin at position 0.

    Row r has pieces ``row_bounds[r] .. row_bounds[r + 1] - 1``; what they leave free at its end
    is padding.
    """

    pieces: Fragments
    """Of all rows, row by row."""
    row_bounds: Int64Array
    """[rows + 1]."""
    seq_length: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.row_bounds) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the stream in all rows, padding not counted."""
        return int(self.pieces.length.sum())

    def row(self, row: int) -> Fragments:
        """The pieces of one row."""
        return self.pieces[slice(int(self.row_bounds[row]), int(self.row_bounds[row + 1]))]

    def cu_seqlens(self, row: int) -> npt.NDArray[np.int32]:
        """int32: where the row's documents start, then ``seq_length``; padding is the last."""
        lengths = self.pieces.length[int(self.row_bounds[row]) : int(self.row_bounds[row + 1])]
        ends = lengths.cumsum()
        bounds = np.empty(len(ends) + 1 + int(ends[-1] < self.seq_length), dtype=np.int32)
        bounds[0], bounds[-1] = 0, self.seq_length
        bounds[1 : len(ends) + 1] = ends
        return bounds
