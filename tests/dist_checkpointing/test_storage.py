"""The stream that a checkpoint's files are written through: all bytes, and their checksum."""

import io
import resource
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megatron.core.dist_checkpointing import storage
from megatron.core.dist_checkpointing.errors import describe


class ShortWrites(io.BytesIO):
    """A raw file that takes at most seven bytes at a time, as raw files may."""

    def write(self, data) -> int:
        return super().write(bytes(data[:7]))


@pytest.mark.parametrize("block", [5, 16, 1 << 20])
def test_every_byte_is_written_and_counted_once(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "WRITE_BYTES", block)
    calls: list[int] = []
    file = ShortWrites()
    stream = storage._ChecksumStream(file, lambda: calls.append(1))
    whole = bytes(range(100)) + torch.arange(9).numpy().tobytes()
    assert stream.write(whole[:100]) == 100
    assert stream.write(torch.arange(9).numpy()) == 72, "in bytes, whatever the items"
    assert file.getvalue() == whole and stream.tell() == stream.size == 172
    assert stream.crc == zlib.crc32(whole)
    assert len(calls) == -(-100 // block) + -(-72 // block)


def test_a_write_that_fails_says_why(tmp_path: Path) -> None:
    """The system's words, not those of torch's zip file: unexpected pos 64 vs 0."""
    writer = storage.ChecksumWriter(tmp_path / "one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    try:
        with pytest.raises(CheckpointException) as caught:
            dcp_save({"weight": torch.zeros(10_000)}, storage_writer=writer, no_dist=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert describe(caught.value) == "rank 0: OSError: [Errno 27] File too large"
