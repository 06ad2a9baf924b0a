"""Reading a tokenised corpus (``prefix.bin`` and ``prefix.idx``) through a memory map.

Nothing is loaded: a read touches just the pages that it needs, and every process of a node
shares them. Opening costs one pass over the index (about 10 ms for a million documents).
Offsets are 64-bit. Slices are read-only views of the map; copy before writing.
"""

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.index_format import (
    DatasetError,
    Int32Array,
    Int64Array,
    map_file,
    read_index,
)


class IndexedDataset:
    """A Megatron corpus: ``dataset[i]`` is sequence i, ``get`` a part of it.

    Args:
        path_prefix: path of the two files without ``.bin`` / ``.idx``.
        vocab_size: if given, reading an id outside ``0..vocab_size - 1`` is an error.

    Raises:
        DatasetError: if a file is missing, damaged or doesn't match the other.
    """

    def __init__(self, path_prefix: str | os.PathLike[str], vocab_size: int | None = None) -> None:
        self.path_prefix = os.fspath(path_prefix)
        self.vocab_size = vocab_size
        self._open()

    def _open(self) -> None:
        bin_path = self.path_prefix + ".bin"
        self._index = read_index(self.path_prefix + ".idx", bin_path)
        self._tokens: npt.NDArray[Any] = np.frombuffer(map_file(bin_path), self._index.dtype)
        if self.vocab_size is not None and not np.issubdtype(self.dtype, np.integer):
            raise DatasetError(f"{bin_path}: holds {self.dtype}, not token ids")
        documents = self._index.document_indices
        if len(documents) == len(self) + 1 and bool(np.all(np.diff(documents) == 1)):
            self._document_ends: Int64Array | None = None  # one sequence a document
        else:
            ends = np.concatenate(([0], np.cumsum(self.sequence_lengths, dtype=np.int64)))
            self._document_ends = ends[documents]

    def __getstate__(self) -> dict[str, Any]:
        return {"path_prefix": self.path_prefix, "vocab_size": self.vocab_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tokens in the file."""
        return self._index.dtype

    @property
    def sequence_lengths(self) -> Int32Array:
        """int32 [sequences]: tokens of each."""
        return self._index.sequence_lengths

    @property
    def sequence_pointers(self) -> Int64Array:
        """int64 [sequences]: byte offset of each in the ``.bin`` file."""
        return self._index.sequence_pointers

    @property
    def document_indices(self) -> Int64Array:
        """int64 [documents + 1]: first sequence of each document, then ``len(self)``."""
        return self._index.document_indices

    @property
    def num_documents(self) -> int:
        """How many documents there are, empty ones included."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents together."""
        return len(self._tokens)

    def document_starts(self, documents: Int64Array) -> Int64Array:
        """For each of these documents the index of its first token in ``all_tokens()``."""
        if self._document_ends is not None:
            return self._document_ends[documents]
        return self.sequence_pointers[documents] // self.dtype.itemsize

    @property
    def document_lengths(self) -> npt.NDArray[np.integer[Any]]:
        """[documents]: tokens of each, over all its sequences."""
        if self._document_ends is None:
            return self.sequence_lengths
        return np.diff(self._document_ends)

    def all_tokens(self) -> npt.NDArray[Any]:
        """The whole ``.bin`` file as one mapped array, unchecked."""
        return self._tokens

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int | slice) -> Any:
        """Sequence ``index`` (array of ``dtype``), or a list of them for a slice."""
        if isinstance(index, slice):
            return [self.get(i) for i in range(*index.indices(len(self)))]
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """``length`` tokens of sequence ``index`` from ``offset`` on (default: to its end).

        Raises:
            IndexError: if there is no such sequence.
            ValueError: if the part isn't inside the sequence.
        """
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"{self.path_prefix}: no sequence {index}; there are {size}")
        index %= size
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize
        total = int(self.sequence_lengths[index])
        return self._slice("sequence", index, start, total, offset, length)

    def get_document(
        self, document: int, offset: int = 0, length: int | None = None
    ) -> npt.NDArray[Any]:
        """As ``get``, for a document, whose sequences are read as one."""
        if not 0 <= document < self.num_documents:
            raise IndexError(
                f"{self.path_prefix}: no document {document}; there are {self.num_documents}"
            )
        if self._document_ends is None:
            return self.get(document, offset, length)
        start, end = (int(self._document_ends[document + i]) for i in (0, 1))
        return self._slice("document", document, start, end - start, offset, length)

    def _slice(
        self, kind: str, number: int, start: int, total: int, offset: int, length: int | None
    ) -> npt.NDArray[Any]:
        end = total if length is None else offset + length
        if not 0 <= offset <= end <= total:
            raise ValueError(
                f"{self.path_prefix}: tokens {offset}..{end} are not inside {kind} {number}, "
                f"which has {total}"
            )
        tokens = self._tokens[start + offset : start + end]
        if self.vocab_size is not None and tokens.size:
            self._check_ids(tokens, kind, number, offset)
        return tokens

    def _check_ids(self, tokens: npt.NDArray[Any], kind: str, number: int, offset: int) -> None:
        assert self.vocab_size is not None
        low = int(tokens.min()) if self.dtype.kind == "i" else 0
        if low >= 0 and int(tokens.max()) < self.vocab_size:
            return
        bad = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
        raise DatasetError(
            f"{self.path_prefix}.bin: token {offset + bad} of {kind} {number} is id {tokens[bad]}, "
            f"outside the vocabulary of {self.vocab_size}: the corpus was made with another "
            f"tokenizer, or --vocab-size is too small"
        )
