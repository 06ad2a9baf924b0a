"""Writing a tokenised corpus, so that what looks whole is whole.

Tokens stream into ``prefix.bin.partial``; at the end ``prefix.idx.partial`` is written, both
reach the disk, and the two are renamed, the ``.idx`` last: a reader that finds ``prefix.idx``
finds a finished pair. A killed writer leaves only ``.partial`` files, which the next run
overwrites. Memory: 4 bytes a sequence and 8 a document.
"""

import array
import contextlib
import os
import shutil
from collections.abc import Sequence
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.index_format import (
    MAX_SEQUENCE_LENGTH,
    DatasetError,
    dtype_code,
    pack_index,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset

_COPY_TOKENS = 1 << 22


class IndexedDatasetBuilder:
    """Writes ``path_prefix.bin`` and ``path_prefix.idx``.

    Used as a context manager it finalizes on a clean exit and removes its files on an error.

    Args:
        path_prefix: path of the two files without extension; its folder is made.
        dtype: type of the tokens in the file; see ``token_dtype``.
    """

    def __init__(
        self, path_prefix: str | os.PathLike[str], dtype: npt.DTypeLike = np.int32
    ) -> None:
        self.path_prefix = os.fspath(path_prefix)
        self.dtype = np.dtype(dtype)
        dtype_code(self.dtype)
        self._lengths = array.array("i")
        self._documents = array.array("q", [0])
        self._finalized = False
        os.makedirs(os.path.dirname(os.path.abspath(self.path_prefix)), exist_ok=True)
        self._bin_partial = self.path_prefix + ".bin.partial"
        self._idx_partial = self.path_prefix + ".idx.partial"
        for leftover in (self._bin_partial, self._idx_partial):
            if os.path.exists(leftover):
                os.unlink(leftover)
        self._file: BinaryIO = open(self._bin_partial, "xb", buffering=1 << 20)  # noqa: SIM115
        self._inode = os.fstat(self._file.fileno()).st_ino

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._documents) - 1

    def add_document(
        self, tokens: npt.ArrayLike, lengths: Sequence[int] | npt.NDArray[Any] | None = None
    ) -> None:
        """Add one document; ``lengths`` cuts it into sequences (default: it is one).

        Raises:
            DatasetError: if an id doesn't fit ``dtype`` or the lengths don't add up.
        """
        self._check_open()
        values = self._converted(tokens)
        parts = [len(values)] if lengths is None else self._whole(lengths).tolist()
        if min(parts, default=0) < 0 or sum(parts) != len(values):
            raise DatasetError(
                f"{self.path_prefix}: sequence lengths {parts} don't add up to the document's "
                f"{len(values)} tokens"
            )
        if max(parts, default=0) > MAX_SEQUENCE_LENGTH:
            raise DatasetError(
                f"{self.path_prefix}: a sequence of {max(parts)} tokens exceeds the format's "
                f"{MAX_SEQUENCE_LENGTH}; cut the document into several sequences"
            )
        self._file.write(values.tobytes())
        self._lengths.extend(parts)
        self._documents.append(len(self._lengths))

    def add_documents(self, tokens: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Add many documents of one sequence each: ``lengths`` tokens, one after another.

        Raises:
            DatasetError: if an id doesn't fit ``dtype`` or the lengths don't add up.
        """
        self._check_open()
        values, counts = self._converted(tokens), self._whole(lengths)
        if counts.size and int(counts.min()) < 0 or int(counts.sum()) != len(values):
            raise DatasetError(
                f"{self.path_prefix}: {len(counts)} document lengths add up to "
                f"{int(counts.sum())}, not to the {len(values)} tokens given"
            )
        if counts.size and int(counts.max()) > MAX_SEQUENCE_LENGTH:
            raise DatasetError(
                f"{self.path_prefix}: a sequence of {int(counts.max())} tokens exceeds the "
                f"format's {MAX_SEQUENCE_LENGTH}; cut the document into several sequences"
            )
        first = len(self._lengths)
        self._file.write(values.tobytes())
        self._lengths.frombytes(counts.astype(np.int32).tobytes())
        ends = np.arange(first + 1, first + 1 + len(counts), dtype=np.int64)
        self._documents.frombytes(ends.tobytes())

    def add_index(self, path_prefix: str | os.PathLike[str]) -> None:
        """Append a whole corpus (for merging); its tokens are widened if need be.

        Raises:
            DatasetError: if its type holds ids that ours can't (uint16 from int32).
        """
        self._check_open()
        other = IndexedDataset(path_prefix)
        if not np.can_cast(other.dtype, self.dtype, "safe"):
            raise DatasetError(
                f"{other.path_prefix}: its {other.dtype} tokens may not fit {self.dtype} of "
                f"{self.path_prefix}; merge into a type that holds both"
            )
        if other.dtype == self.dtype:
            with open(other.path_prefix + ".bin", "rb") as source:
                shutil.copyfileobj(source, self._file, 1 << 24)
        else:
            tokens = other.all_tokens()
            for start in range(0, len(tokens), _COPY_TOKENS):
                self._file.write(tokens[start : start + _COPY_TOKENS].astype(self.dtype).tobytes())
        first = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.astype(np.int32).tobytes())
        self._documents.frombytes((other.document_indices[1:] + first).tobytes())

    def finalize(self) -> None:
        """Write the index and give both files their final names, the ``.idx`` last.

        Raises:
            DatasetError: on a second call, or if another process writes the same prefix.
        """
        self._check_open()
        _flush_to_disk(self._file)
        self._file.close()
        with open(self._idx_partial, "wb") as file:
            file.write(
                pack_index(
                    self.dtype,
                    np.frombuffer(self._lengths, np.int32),
                    np.frombuffer(self._documents, np.int64),
                )
            )
            _flush_to_disk(file)
        if not self._owns_partial():
            raise DatasetError(
                f"{self._bin_partial}: another process has begun to write {self.path_prefix}; "
                f"give each writer its own --output-prefix"
            )
        # An old index must never stand beside new tokens.
        if os.path.exists(self.path_prefix + ".idx"):
            os.unlink(self.path_prefix + ".idx")
        os.replace(self._bin_partial, self.path_prefix + ".bin")
        os.replace(self._idx_partial, self.path_prefix + ".idx")
        _sync_folder(os.path.dirname(os.path.abspath(self.path_prefix)))
        self._finalized = True

    def abort(self) -> None:
        """Remove what was written; nothing under the final names is touched."""
        with contextlib.suppress(OSError):  # on a full disk closing fails once more
            self._file.close()
        if self._owns_partial():
            for path in (self._bin_partial, self._idx_partial):
                if os.path.exists(path):
                    os.unlink(path)

    def _owns_partial(self) -> bool:
        try:
            return os.stat(self._bin_partial).st_ino == self._inode
        except FileNotFoundError:
            return False

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._finalized:
            self.finalize()

    def _check_open(self) -> None:
        if self._finalized:
            raise DatasetError(f"{self.path_prefix}: already finalized; begin another builder")

    def _whole(self, lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Lengths as a flat array of int64; a fraction is refused, not cut off."""
        values = np.asarray(lengths)
        if values.ndim != 1 or values.size and not np.issubdtype(values.dtype, np.integer):
            raise DatasetError(
                f"{self.path_prefix}: lengths must be a flat list of whole numbers, not "
                f"{values.dtype} of shape {list(values.shape)}"
            )
        return values.astype(np.int64)

    def _converted(self, tokens: npt.ArrayLike) -> npt.NDArray[Any]:
        """``tokens`` as a flat array of ``dtype``, every value checked."""
        values = np.asarray(tokens)
        if values.size == 0:
            return np.empty(0, self.dtype)
        if values.ndim != 1:
            raise DatasetError(f"{self.path_prefix}: a document must be flat, not {values.shape}")
        if values.dtype == self.dtype or np.can_cast(values.dtype, self.dtype, "safe"):
            return values.astype(self.dtype, copy=False)
        if np.issubdtype(self.dtype, np.integer):
            if not np.issubdtype(values.dtype, np.integer):
                raise DatasetError(f"{self.path_prefix}: token ids must be integers")
            limits = np.iinfo(self.dtype)
            low, high = int(values.min()), int(values.max())
            if low < limits.min or high > limits.max:
                raise DatasetError(
                    f"{self.path_prefix}: token id {low if low < limits.min else high} doesn't "
                    f"fit {self.dtype} ({limits.min}..{limits.max}); choose the type by the "
                    f"largest id that the tokenizer has"
                )
        return values.astype(self.dtype)


def _flush_to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
