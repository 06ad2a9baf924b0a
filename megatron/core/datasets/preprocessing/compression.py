"""Reading ``.gz`` and ``.zst`` files as a stream of blocks, damage found.

Several members or frames in one file are read as one. A file that ends before its stream does is
an error (zstandard's own reader ends quietly there). Memory: one block.
"""

import contextlib
import os
import zlib
from collections.abc import Iterator
from typing import Any

from megatron.core.datasets.preprocessing.records import CorpusError

SUFFIXES = (".gz", ".zst")
OTHERS = (".bz2", ".xz", ".lzma", ".lz4", ".br", ".sz", ".snappy", ".Z", ".zstd")
"""Compressions that aren't read; never text."""
ARCHIVES = (".tar", ".tgz", ".tbz2", ".txz", ".zip", ".7z", ".rar")
_READ = 1 << 14  # at usual ratios a block of about 100 KB


def is_compressed(path: str) -> bool:
    """Whether the name says so."""
    return path.lower().endswith(SUFFIXES)


def inner_name(path: str) -> str:
    """The name without a compression suffix."""
    return os.path.splitext(path)[0] if is_compressed(path) else path


def blocks(path: str) -> Iterator[tuple[bytes, int]]:
    """(decompressed bytes, bytes of the file read so far), to the end.

    Raises:
        CorpusError: naming the file, if it is damaged, cut short or not of its suffix's format.
    """
    make, failure = (_gzip, zlib.error) if path.lower().endswith(".gz") else _zstandard()
    decompressor, fed, read, members = make(), False, 0, 0
    padded = path.lower().endswith(".gz")  # NULs behind a member are allowed, however many
    with open(path, "rb") as file:
        while chunk := file.read(_READ):
            read += len(chunk)
            while chunk:
                if padded and members and not fed:
                    chunk = chunk.lstrip(b"\0")
                    if not chunk:
                        break
                try:
                    data = decompressor.decompress(chunk)
                except failure as error:
                    raise CorpusError(f"{path}: damaged: {error}") from error
                fed, chunk = True, b""
                if decompressor.eof:
                    chunk, decompressor, fed = decompressor.unused_data, make(), False
                    members += 1
                if data:
                    yield data, read
    if fed:
        raise CorpusError(f"{path}: cut short: the compressed stream ends in the middle")


def read_all(path: str) -> bytes:
    """A whole file, decompressed where its name says so."""
    if is_compressed(path):
        return b"".join(data for data, _ in blocks(path))
    with open(path, "rb") as file:
        return file.read()


def _gzip() -> Any:
    return zlib.decompressobj(wbits=31)


def _zstandard() -> tuple[Any, Any]:
    with contextlib.suppress(ImportError):
        import zstandard

        def make() -> Any:
            return zstandard.ZstdDecompressor().decompressobj()

        return make, zstandard.ZstdError
    raise CorpusError("reading .zst files needs the zstandard package: pip install '.[zstd]'")
