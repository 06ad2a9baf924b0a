"""The one position in the data, and the rows of each global batch from there on.

A planner owns a stream reader and the pieces that a packing left over, and gives the rows of
one global batch at a time. All of it is lengths and numbers, the same on every rank; nothing
depends on how rows are divided among ranks. A saved position can be continued with another
sequence length, batch size, packing or blend.

State (JSON-able)::

    {"stream": {...},             how far each component was drawn
     "corpora": [[identity, name], ...], "pieces": [[corpus, document, start, length, ends], ...],
     "consumed_tokens": ..., "padded_tokens": ..., "consumed_samples": ...}

``consumed_tokens`` counts tokens of documents in consumed rows; padding is counted apart.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.datasets.corpus import Corpus, IndexedCorpus
from megatron.core.datasets.document_source import DocumentSource
from megatron.core.datasets.document_stream import StreamPosition
from megatron.core.datasets.fragments import Fragments, PackedRows
from megatron.core.datasets.index_format import DatasetError
from megatron.core.datasets.packing import BEST_FIT_WINDOW, PACKINGS, pack_rows


@dataclasses.dataclass(frozen=True)
class DataPosition:
    """A position between two global batches."""

    stream: StreamPosition
    pending: Fragments
    corpora: tuple[Corpus, ...]
    consumed_tokens: int
    """Tokens of documents in all rows before."""
    padded_tokens: int
    """Padding in all rows before."""
    consumed_samples: int
    """Rows before."""

    def state(self) -> dict[str, Any]:
        """JSON-able; what ``RowPlanner`` accepts."""
        used, number = np.unique(self.pending.corpus, return_inverse=True)
        columns = (number, self.pending.document, self.pending.start, self.pending.length)
        pieces = zip(*(c.tolist() for c in (*columns, self.pending.ends_document.astype(np.int64))))
        return {
            "stream": self.stream.state(),
            "corpora": [[self.corpora[i].identity, self.corpora[i].name] for i in used],
            "pieces": [list(piece) for piece in pieces],
            "consumed_tokens": self.consumed_tokens,
            "padded_tokens": self.padded_tokens,
            "consumed_samples": self.consumed_samples,
        }

    @property
    def padding_rate(self) -> float:
        """Share of padding in all rows before."""
        return self.padded_tokens / max(1, self.padded_tokens + self.consumed_tokens)


class RowPlanner:
    """Gives the rows of one global batch after the other.

    Raises:
        DatasetError: if the state is damaged or speaks of a corpus that can't be found.
    """

    def __init__(
        self,
        source: DocumentSource,
        state: dict[str, Any] | None = None,
        *,
        packing: str,
        seq_length: int,
        global_batch_size: int,
        best_fit_window: int = BEST_FIT_WINDOW,
    ) -> None:
        if packing not in PACKINGS:
            raise DatasetError(f"--packing {packing} must be one of {', '.join(PACKINGS)}")
        if best_fit_window < 1:
            raise DatasetError(f"best_fit_window {best_fit_window} must be at least 1")
        self._packing, self._seq_length, self._num_rows = packing, seq_length, global_batch_size
        self._window = best_fit_window
        stored = state or {"stream": None, "corpora": [], "pieces": []}
        missing = {"stream", "corpora", "pieces"} - set(stored)
        if missing:
            raise DatasetError(f"the saved position in the data lacks {sorted(missing)}")
        self._reader = source.reader(stored["stream"])
        self.corpora: list[Corpus] = list(source.corpora)
        self._pending = self._restored(stored["corpora"], stored["pieces"])
        self._identities = np.array([int(c.identity, 16) for c in self.corpora], dtype=np.uint64)
        self._tokens = int(stored.get("consumed_tokens", 0))
        self._padded = int(stored.get("padded_tokens", 0))
        self._samples = int(stored.get("consumed_samples", 0))

    def position(self) -> DataPosition:
        """Where the next global batch begins."""
        return DataPosition(
            self._reader.position(),
            self._pending,
            tuple(self.corpora),
            self._tokens,
            self._padded,
            self._samples,
        )

    @property
    def consumed_samples(self) -> int:
        """Rows given so far."""
        return self._samples

    def next_rows(self) -> PackedRows:
        """The rows of the next global batch."""
        rows, self._pending = pack_rows(
            self._packing,
            self._reader,
            self._pending,
            num_rows=self._num_rows,
            seq_length=self._seq_length,
            window=self._window,
        )
        self._tokens += rows.num_tokens
        self._padded += self._num_rows * self._seq_length - rows.num_tokens
        self._samples += self._num_rows
        return rows

    def row_hash(self, pieces: Fragments, seq_length: int) -> int:
        """63-bit hash of what fills a row, whichever blend or folder it came from."""
        digest = hashlib.blake2b(seq_length.to_bytes(8, "little"), digest_size=8)
        digest.update(self._identities[pieces.corpus].data)
        for values in (pieces.document, pieces.start, pieces.length):
            digest.update(values.data)
        return int.from_bytes(digest.digest(), "little") >> 1

    def _restored(
        self, corpora: Sequence[Sequence[str]], pieces: Sequence[Sequence[int]]
    ) -> Fragments:
        """The pieces of a saved position, their corpora found by content or opened again."""
        if not pieces:
            return Fragments.empty()
        numbers = np.array([self._corpus_number(*entry) for entry in corpora], dtype=np.int64)
        corpus, document, start, length, ends = np.array(pieces, dtype=np.int64).T
        return Fragments(numbers[corpus], document, start, length, ends.astype(np.bool_))

    def _corpus_number(self, identity: str, name: str) -> int:
        for number, corpus in enumerate(self.corpora):
            if corpus.identity == identity:
                return number
        # Begun under an earlier blend: what is left of its documents is still read.
        try:
            corpus = IndexedCorpus(name)
        except DatasetError as error:
            raise DatasetError(
                f"documents of {name} were begun before the checkpoint and must be finished, "
                f"but it can't be read ({error}); keep the corpus in place"
            ) from error
        if corpus.identity != identity:
            raise DatasetError(
                f"{name} isn't the corpus it was when the checkpoint was written, and documents of "
                "it were begun; put its old files back, and write the new ones under another name"
            )
        self.corpora.append(corpus)
        return len(self.corpora) - 1
