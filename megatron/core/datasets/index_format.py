"""The ``.idx`` file: Megatron's format, written and checked byte by byte.

A corpus is a pair of files. ``.bin`` is all tokens, one after another, in one integer type.
``.idx`` says where sequences and documents lie (little-endian, no padding)::

    9 B  "MMIDIDX\\0\\0" | u64 version = 1 | u8 type code | u64 sequences n | u64 documents + 1
    i32[n] lengths in tokens | i64[n] byte offsets | i64[documents + 1] first sequence of each

A document is a run of sequences (usually one). Everything is checked when a file is opened:
one pass over the index, about 10 ms for a million documents. What the format allows but no
writer makes (gaps between sequences) is refused, as is the extra array of multimodal files.
"""

import dataclasses
import mmap
import os
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
MAX_SEQUENCE_LENGTH = 2**31 - 1

DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("int16"),
    4: np.dtype("int32"),
    5: np.dtype("int64"),
    6: np.dtype("float64"),
    7: np.dtype("float32"),
    8: np.dtype("uint16"),
}

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class DatasetError(ValueError):
    """A corpus file that is missing, damaged or not what the run needs."""


@dataclasses.dataclass(frozen=True)
class Index:
    """What an ``.idx`` file says; the arrays are views of the mapped file."""

    dtype: np.dtype[Any]
    sequence_lengths: Int32Array
    """int32 [sequences]: tokens of each."""
    sequence_pointers: Int64Array
    """int64 [sequences]: byte offset of each in the ``.bin`` file."""
    document_indices: Int64Array
    """int64 [documents + 1]: first sequence of each document, then the number of sequences."""


def sequence_pointers(lengths: npt.ArrayLike, itemsize: int) -> Int64Array:
    """Byte offsets of sequences of these lengths (tokens), in 64 bits throughout."""
    wide = np.asarray(lengths, dtype=np.int64)
    pointers = np.zeros(len(wide), dtype=np.int64)
    np.cumsum(wide[:-1], out=pointers[1:])
    pointers *= itemsize
    return pointers


def dtype_code(dtype: npt.DTypeLike) -> int:
    """The format's code of a numpy type.

    Raises:
        DatasetError: if the format has no such type.
    """
    wanted = np.dtype(dtype)
    for code, known in DTYPE_CODES.items():
        if known == wanted:
            return code
    names = ", ".join(str(known) for known in DTYPE_CODES.values())
    raise DatasetError(f"token type {wanted} has no code in the .idx format; use one of {names}")


def token_dtype(largest_id: int) -> np.dtype[Any]:
    """The smallest type Megatron uses that holds every id up to ``largest_id``.

    uint16 up to 65535, int32 beyond. ``largest_id`` is the largest id that the tokenizer can
    ever give, added and special tokens included, not the largest seen.

    Raises:
        DatasetError: for an id below 0 or beyond int32.
    """
    if not 0 <= largest_id < 2**31:
        raise DatasetError(f"largest token id {largest_id} must be in 0..{2**31 - 1}")
    return np.dtype(np.uint16 if largest_id <= 65535 else np.int32)


def merged_dtype(dtypes: list[np.dtype[Any]]) -> np.dtype[Any]:
    """The type of a merge of corpora: the smallest of the format that holds them all exactly.

    uint16 with int32 gives int32.

    Raises:
        DatasetError: if there are none, or no integer type of the format holds them all.
    """
    if not dtypes:
        raise DatasetError("nothing to merge: no corpus given")
    merged = np.result_type(*dtypes)
    if any(np.issubdtype(d, np.integer) for d in dtypes) and not np.issubdtype(merged, np.integer):
        raise DatasetError(f"corpora of types {sorted(map(str, set(dtypes)))} can't be merged")
    dtype_code(merged)
    return merged


def pack_index(
    dtype: npt.DTypeLike, lengths: npt.ArrayLike, document_indices: npt.ArrayLike
) -> bytes:
    """The bytes of an ``.idx`` file."""
    kind = np.dtype(dtype)
    documents = np.asarray(document_indices, dtype=np.int64)
    lengths32 = np.asarray(lengths, dtype=np.int32)
    header = MAGIC + struct.pack("<QBQQ", VERSION, dtype_code(kind), len(lengths32), len(documents))
    pointers = sequence_pointers(lengths32, kind.itemsize)
    return b"".join(
        (
            header,
            lengths32.astype("<i4").tobytes(),
            pointers.astype("<i8").tobytes(),
            documents.astype("<i8").tobytes(),
        )
    )


def read_index(idx_path: str, bin_path: str) -> Index:
    """Map and check an ``.idx`` file against itself and the size of its ``.bin`` file.

    Raises:
        DatasetError: naming the file, what it says and what it should say.
    """
    data = map_file(idx_path)
    dtype, sequences, documents = _read_header(idx_path, data)
    offsets = _array_offsets(idx_path, len(data), sequences, documents)
    index = Index(
        dtype,
        np.frombuffer(data, "<i4", sequences, offsets[0]),
        np.frombuffer(data, "<i8", sequences, offsets[1]),
        np.frombuffer(data, "<i8", documents, offsets[2]),
    )
    _check_index(idx_path, index)
    _check_bin_size(idx_path, bin_path, index)
    return index


def check_header(idx_path: str) -> None:
    """The quick part of :func:`read_index`: the header, and whether the file has its length.

    Reads a few bytes, whatever the size of the file.

    Raises:
        DatasetError: as :func:`read_index`.
    """
    data = map_file(idx_path)
    _, sequences, documents = _read_header(idx_path, data)
    _array_offsets(idx_path, len(data), sequences, documents)


def _array_offsets(
    path: str, size: int, sequences: int, documents: int
) -> tuple[int, int, int, int]:
    """Where the three arrays start and the last one ends; refuses a file of another size."""
    lengths = HEADER_BYTES
    pointers = lengths + 4 * sequences
    firsts = pointers + 8 * sequences
    end = firsts + 8 * documents
    if size != end:
        hint = "cut short: write it again"
        if size > end:
            hint = "too long"
            if size - end == sequences:
                hint = "too long by one byte a sequence: multimodal files are not supported"
        raise DatasetError(
            f"{path}: {size} bytes, but {sequences} sequences and {documents - 1} "
            f"documents need {end} ({hint})"
        )
    return lengths, pointers, firsts, end


def map_file(path: str) -> mmap.mmap | bytes:
    """A read-only map of a file (plain empty bytes for an empty file, which can't be mapped).

    Raises:
        DatasetError: if the file can't be read.
    """
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        hint = ""
        if path.endswith((".bin.bin", ".idx.idx", ".bin.idx", ".idx.bin")):
            hint = f"; give the prefix without extension: {path[:-8]}"
        raise DatasetError(f"{path}: {error.strerror}{hint}") from error


def _read_header(path: str, data: mmap.mmap | bytes) -> tuple[np.dtype[Any], int, int]:
    if len(data) < HEADER_BYTES:
        raise DatasetError(f"{path}: {len(data)} bytes is shorter than the {HEADER_BYTES} B header")
    magic = bytes(data[: len(MAGIC)])
    if magic != MAGIC:
        raise DatasetError(f"{path}: starts with {magic!r}, not {MAGIC!r}: not a Megatron index")
    version, code, sequences, documents = struct.unpack("<QBQQ", data[len(MAGIC) : HEADER_BYTES])
    if version != VERSION:
        raise DatasetError(f"{path}: format version {version}; only version {VERSION} is known")
    if code not in DTYPE_CODES:
        raise DatasetError(f"{path}: token type code {code} is none of {sorted(DTYPE_CODES)}")
    if documents < 1:
        raise DatasetError(f"{path}: document count field is 0; it must be documents + 1")
    return DTYPE_CODES[code], sequences, documents


def _check_index(path: str, index: Index) -> None:
    lengths, documents = index.sequence_lengths, index.document_indices
    if len(lengths) and int(lengths.min()) < 0:
        bad = int(np.argmax(lengths < 0))
        raise DatasetError(f"{path}: sequence {bad} has negative length {lengths[bad]}")
    expected = sequence_pointers(lengths, index.dtype.itemsize)
    if not np.array_equal(index.sequence_pointers, expected):
        bad = int(np.argmax(index.sequence_pointers != expected))
        raise DatasetError(
            f"{path}: sequence {bad} is said to start at byte {index.sequence_pointers[bad]}, "
            f"but the lengths before it end at byte {expected[bad]}"
        )
    if documents[0] != 0 or documents[-1] != len(lengths):
        raise DatasetError(
            f"{path}: documents span sequences {documents[0]}..{documents[-1]}, "
            f"but there are sequences 0..{len(lengths)}"
        )
    steps = np.diff(documents)
    if len(steps) and int(steps.min()) < 0:
        bad = int(np.argmax(steps < 0))
        raise DatasetError(
            f"{path}: document {bad} starts at sequence {documents[bad]}, "
            f"after the next one ({documents[bad + 1]})"
        )


def _check_bin_size(idx_path: str, bin_path: str, index: Index) -> None:
    need = 0
    if len(index.sequence_lengths):
        last = int(index.sequence_lengths[-1]) * index.dtype.itemsize
        need = int(index.sequence_pointers[-1]) + last
    try:
        have = os.stat(bin_path).st_size
    except OSError as error:
        raise DatasetError(f"{bin_path}: {error.strerror}, though {idx_path} exists") from error
    if have != need:
        word = "short" if have < need else "long"
        raise DatasetError(
            f"{bin_path}: {have} bytes, {abs(have - need)} too {word}: {idx_path} lists "
            f"{len(index.sequence_lengths)} sequences of {need} bytes together"
        )
