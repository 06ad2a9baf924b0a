"""A save and a load say that they get on: for each block written, flushed, checked or read."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import (
    SaveFolder,
    make_pieces,
    read_pieces,
    storage,
    verify_checkpoint,
    write_checkpoint,
)
from tests.utils.ranks import run_ranks

BLOCK = 1000
VALUES = 20 * BLOCK


def count(rank: int, world: int, root: str) -> tuple[int, int, int, int]:
    """Calls while writing, flushes, calls while checking and while reading."""
    group = dist.new_group(backend="gloo")
    calls: list[int] = []
    flushes: list[int] = []
    original = os.fdatasync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "WRITE_BYTES", BLOCK)
        patch.setattr(storage, "SYNC_BYTES", 30 * BLOCK)
        patch.setattr(os, "fdatasync", lambda file: (flushes.append(file), original(file)))
        tensors = {f"t{i}": torch.arange(VALUES, dtype=torch.int32) + i for i in range(2)}
        folder = write_checkpoint(
            SaveFolder(Path(root)),
            1,
            make_pieces(tensors.items(), {}),
            {},
            group=group,
            progress=lambda: calls.append(1),
        )
    written = len(calls)
    verify_checkpoint(folder, group=group, progress=lambda: calls.append(1))
    checked = len(calls) - written
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    pieces = make_pieces(loaded.items(), {})
    read_pieces(folder, pieces, group=group, progress=lambda: calls.append(1))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    return written, len(flushes), checked, len(calls) - written - checked


def count_removals(rank: int, world: int, root: str) -> list[int]:
    """Calls of four saves; the last one removes three checkpoints and a leaving."""
    group = dist.new_group(backend="gloo")
    calls: list[int] = [0] * 4

    def progress() -> None:
        calls[iteration - 1] += 1

    for iteration in (1, 2, 3, 4):
        if iteration == 4:
            (Path(root) / ".saving_iter_0000009.gone").mkdir()
        pieces = make_pieces([("t", torch.zeros(4))], {})
        target = SaveFolder(Path(root), keep=1 if iteration == 4 else 0)
        write_checkpoint(target, iteration, pieces, {}, group=group, progress=progress)
    return calls


def test_each_removal_counts(tmp_path: Path) -> None:
    """Old checkpoints may take long to remove, for instance the first time with few to keep."""
    [calls] = run_ranks(1, count_removals, str(tmp_path))
    assert calls[1] == calls[2] and calls[3] == calls[2] + 4
    assert [folder.name for folder in tmp_path.glob("*iter_*")] == ["iter_0000004"]


def test_each_block_counts(tmp_path: Path) -> None:
    [(written, flushes, checked, read)] = run_ranks(1, count, str(tmp_path))
    assert written >= 2 * 4 * VALUES / BLOCK
    assert flushes == 2 * 4 * VALUES // (30 * BLOCK)
    assert checked >= 3, "tensors, listing and state"
    assert read >= 2, "each tensor"
