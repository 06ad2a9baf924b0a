"""Files on disk: checksums while writing, and a reader that can't be made to run code.

The listing comes checked from ``listing.py``. A tensor's bytes go through
``torch.load(weights_only=True)``, and what comes out must be what the listing says of it.
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
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from megatron.core.dist_checkpointing.directory import checked_file
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.progress import Progress, no_progress


class SafeReader(FileSystemReader):
    """Reads tensors by weights-only loading, from a listing that was read safely before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = self._metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As torch's, one file after the other; every tensor is checked before it is copied."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            place = self._metadata.storage_data[item.storage_index]
            by_file.setdefault(place.relative_path, []).append(item)
        for name, items in by_file.items():
            path = checked_file(self._folder, name)
            with path.open("rb") as file:
                for item in items:
                    try:
                        tensor = self._load(file, item.storage_index)
                    except CheckpointError as error:
                        raise CheckpointError(f"{path}: {error}") from None
                    part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
                    target = planner.resolve_tensor(item).detach()
                    assert target.shape == part.shape
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load(self, file: BinaryIO, index: MetadataIndex) -> torch.Tensor:
        """The chunk that the listing speaks of, and nothing else."""
        place, entry = self._metadata.storage_data[index], self._metadata.state_dict_metadata
        stored = entry[index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        assert index.index is not None
        chunk = stored.chunks[index.index]
        assert chunk.offsets == index.offset
        view: Any = self._slice_file(file, place)
        try:
            tensor = torch.load(view, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            # torch's own advice is to load it without looking; that is never right here.
            raise CheckpointError(
                f"in the place of {index.fqn!r} is something other than tensors, or they are "
                "damaged; it is refused"
            ) from None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            raise CheckpointError(f"{index.fqn!r} can't be read: {reason}") from None
        if type(tensor) is not torch.Tensor:
            raise CheckpointError(
                f"in the place of {index.fqn!r} is something other than one tensor; it is refused"
            )
        expected = (stored.properties.dtype, tuple(chunk.sizes))
        if (tensor.dtype, tuple(tensor.shape)) != expected or not tensor.is_contiguous():
            raise CheckpointError(
                f"in the place of {index.fqn!r} is a tensor of {tensor.dtype} and shape "
                f"{tuple(tensor.shape)} instead of {expected[0]} and {expected[1]}"
            )
        return tensor


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
        self.failure: OSError | None = None

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
        try:
            while done < len(block):  # a raw file may take less than it is given
                done += self._file.write(block[done:])
        except OSError as error:
            self.failure = error
            raise
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
        except RuntimeError:
            # torch's zip file, closed after a write that failed, complains of itself instead.
            if stream.failure is None:
                raise
            raise stream.failure from None
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
