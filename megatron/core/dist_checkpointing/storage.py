"""Files on disk: checksums while writing, and a reader that can't be made to run code.

``.metadata`` is a pickle. It is read by an unpickler that knows the handful of plain classes
a tensor listing is made of and refuses everything else; tensors themselves go through
``torch.load(weights_only=True)``. File names from the listing may not leave the folder.
"""

import io
import os
import pickle
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.progress import Progress, no_progress

_METADATA_MODULES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_MODULES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"the checkpoint's .metadata asks for {module}.{name}, which a tensor listing never "
            "needs; it is refused (a file from a stranger could run code that way)"
        )


def read_metadata_safely(path: Path) -> Metadata:
    """Unpickle a ``.metadata`` file by the restricted unpickler.

    Raises:
        CheckpointError: if it is damaged, or holds anything but a tensor listing.
    """
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} holds a {type(metadata).__name__}, not a tensor listing")
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if not isinstance(name, str) or name != os.path.basename(name):
            raise CheckpointError(f"{path}: {index.fqn!r} lies in {name!r}, outside the folder")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{path}: {index.fqn!r} needs a transform; none is known here")
    return metadata


class SafeReader(FileSystemReader):
    """Reads tensors by weights-only loading, from a listing that was read safely before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = self._metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


WRITE_BYTES = 64 << 20
"""After so many bytes a writer says that it gets on."""
SYNC_BYTES = 1 << 30
"""After so many bytes they are flushed to disk, so that the flush at the end is no long silence."""


class _ChecksumStream(io.RawIOBase):
    """Passes writes on and keeps their crc32; readers see the plain file."""

    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        self._file = file
        self._progress = progress
        self._synced = 0
        self.crc = 0
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), WRITE_BYTES):
            self._write_block(view[start : start + WRITE_BYTES])
        return len(view)

    def _write_block(self, block: memoryview) -> None:
        self.crc = zlib.crc32(block, self.crc)
        done = 0
        while done < len(block):  # a raw file may take less than it is given
            done += self._file.write(block[done:])
        self.size += done
        if self.size - self._synced >= SYNC_BYTES:
            os.fdatasync(self._file.fileno())
            self._synced = self.size
        self._progress()

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        super().close()


class _ChecksumFileSystem(FileSystem):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.written: dict[str, tuple[int, int]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        # Tensors come in large blocks; a buffer would only copy them once more.
        file = Path(path).open("wb", buffering=0)  # noqa: SIM115
        stream = _ChecksumStream(file, self._progress)
        try:
            yield stream
        finally:
            stream.close()
        self.written[Path(path).name] = (stream.crc, stream.size)

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        name = Path(path).name
        if name in self.written:
            self.written[Path(new_path).name] = self.written.pop(name)


class ChecksumWriter(FileSystemWriter):
    """torch's writer into a fresh folder, keeping crc32 and size of each file it wrote."""

    def __init__(self, folder: Path, progress: Progress = no_progress) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, overwrite=False)
        self._checksums = _ChecksumFileSystem(progress)
        self.fs = self._checksums

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch's, without zip's own crc32 of each record: ours covers the whole file."""
        before = get_crc32_options()
        set_crc32_options(False)
        try:
            return super().write_data(plan, planner)
        finally:
            set_crc32_options(before)

    @property
    def written(self) -> dict[str, tuple[int, int]]:
        """Name -> (crc32, bytes) of the files this rank wrote."""
        return dict(self._checksums.written)
