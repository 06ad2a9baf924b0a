"""Checkpoints over ranks: resharding, completeness, damage, malice, background saves."""

import json
import os
import pickle
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron.core.dist_checkpointing import (
    CheckpointError,
    CheckpointSaver,
    SaveFolder,
    checkpoint_io,
    choose_checkpoint,
    directory,
    iteration_folder,
    latest_iteration,
    make_pieces,
    read_listing,
    read_pieces,
    read_state,
    verify_checkpoint,
    write_checkpoint,
)
from tests.utils.ranks import run_ranks

VOCAB, PADDED = 97, 128
ROWS = {"embedding.weight": VOCAB}


def full_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    table = torch.randn(PADDED, 6, generator=generator, dtype=torch.float64)
    table[VOCAB:] = 0
    return {
        "model.embedding.weight": table,
        "model.linear.weight": torch.randn(10, 7, generator=generator),
        "model.norm.weight": torch.randn(5, generator=generator),
        "step": torch.tensor(3.0),
    }


def placed(grid: tuple[int, int], placements: tuple[list, list]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", grid, mesh_dim_names=("a", "b"))
    full = full_tensors()
    return {
        "model.embedding.weight": distribute_tensor(
            full["model.embedding.weight"], mesh, placements[0]
        ),
        "model.linear.weight": distribute_tensor(full["model.linear.weight"], mesh, placements[1]),
        "model.norm.weight": distribute_tensor(
            full["model.norm.weight"], mesh, [Replicate(), Shard(0)]
        ),
        "step": full["step"],
    }


LAYOUTS = [
    ((4, 1), ([Shard(0), Shard(0)], [Shard(0), Shard(1)])),
    ((2, 2), ([Shard(0), Shard(1)], [Shard(1), Shard(0)])),
    ((1, 4), ([Replicate(), Shard(0)], [Replicate(), Replicate()])),
]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def zero_(tensor: torch.Tensor) -> None:
    (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-1)


def save_then_load(rank: int, world: int, root: str, source: int, target: int) -> None:
    group = dist.new_group(backend="gloo")
    tensors = placed(*LAYOUTS[source])
    folder = write_checkpoint(
        SaveFolder(Path(root)), 5, make_pieces(tensors.items(), ROWS), {"iteration": 5}, group=group
    )
    verify_checkpoint(folder, group=group)
    stored = read_listing(folder, group=group).state_dict_metadata
    assert tuple(stored["model.embedding.weight"].size) == (VOCAB, 6)
    loaded = placed(*LAYOUTS[target])
    for tensor in loaded.values():
        zero_(tensor)
    read_pieces(folder, make_pieces(loaded.items(), ROWS), group=group)
    for name, tensor in full_tensors().items():
        got = whole(loaded[name])
        if name == "model.embedding.weight":
            assert torch.equal(got[:VOCAB], tensor[:VOCAB])
            assert (got[VOCAB:] == -1).all(), "padding is not stored"
        else:
            assert torch.equal(got, tensor), name


@pytest.mark.parametrize("source", range(3))
@pytest.mark.parametrize("target", range(3))
def test_any_layout_reads_any_layout(tmp_path: Path, source: int, target: int) -> None:
    run_ranks(4, save_then_load, str(tmp_path), source, target)


def write_one(rank: int, world: int, root: str, iteration: int = 1, keep: int = 0) -> None:
    group = dist.new_group(backend="gloo")
    pieces = make_pieces(
        placed(*LAYOUTS[1]).items() if world == 4 else full_tensors().items(), ROWS
    )
    state = {"iteration": iteration}
    target = SaveFolder(Path(root), keep=keep)
    write_checkpoint(target, iteration, pieces, state, group=group)


def test_files_and_pointer(tmp_path: Path) -> None:
    run_ranks(4, write_one, str(tmp_path), 1)
    folder = iteration_folder(tmp_path, 1)
    names = {path.name for path in folder.iterdir()}
    assert {".metadata", "state.json", "checksums.json"} <= names
    assert read_state(folder) == {"iteration": 1}
    assert latest_iteration(tmp_path) == (1, None)
    assert not list(tmp_path.glob(".saving_*"))


def test_keep_and_broken_folders(tmp_path: Path) -> None:
    partial = iteration_folder(tmp_path, 2)
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".saving_iter_0000009").mkdir()
    for iteration in (1, 2, 3, 4):
        run_ranks(2, write_one_pair, str(tmp_path), iteration, 2)
    assert directory.complete_iterations(tmp_path) == [3, 4]
    assert directory.all_iterations(tmp_path) == [3, 4]
    assert not list(tmp_path.glob(".saving_*"))


def test_a_run_that_was_set_back_keeps_what_it_saves(tmp_path: Path) -> None:
    """With --ckpt-step 2 after 6: the checkpoint of 4 counts, that of 6 isn't touched."""
    for iteration in (2, 6):
        run_ranks(2, write_one, str(tmp_path), iteration)
    run_ranks(2, write_one, str(tmp_path), 4, 1)
    assert directory.complete_iterations(tmp_path) == [4, 6]
    assert latest_iteration(tmp_path) == (4, None)


def write_one_pair(rank: int, world: int, root: str, iteration: int, keep: int) -> None:
    write_one(rank, world, root, iteration, keep)


@pytest.mark.parametrize("text", [b"", b"garbage\xff", b"77\n", b"release\n"])
def test_bad_pointer_falls_back_with_a_warning(tmp_path: Path, text: bytes) -> None:
    run_ranks(2, write_one, str(tmp_path), 3)
    (tmp_path / directory.POINTER).write_bytes(text)
    iteration, warning = latest_iteration(tmp_path)
    assert iteration == 3
    assert warning is not None and "newest whole checkpoint, 3" in warning


def expect_damage(rank: int, world: int, root: str, word: str) -> str:
    group = dist.new_group(backend="gloo")
    with pytest.raises(CheckpointError, match=word) as caught:
        verify_checkpoint(iteration_folder(Path(root), 1), group=group)
    return str(caught.value)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "state", "metadata"])
def test_damage_is_named_on_all_ranks(tmp_path: Path, damage: str) -> None:
    run_ranks(2, write_one, str(tmp_path), 1)
    folder = iteration_folder(tmp_path, 1)
    shard = sorted(folder.glob("*.distcp"))[-1]
    target = {"state": folder / "state.json", "metadata": folder / ".metadata"}.get(damage, shard)
    data = bytearray(target.read_bytes())
    if damage == "remove":
        target.unlink()
    elif damage == "truncate":
        target.write_bytes(data[:-10])
    else:
        data[len(data) // 2] ^= 1
        target.write_bytes(data)
    messages = run_ranks(2, expect_damage, str(tmp_path), target.name)
    assert messages[0] == messages[1]


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/should-not-exist-evil",))


def read_evil(rank: int, world: int, root: str) -> None:
    group = dist.new_group(backend="gloo")
    pieces = make_pieces(full_tensors().items(), ROWS)
    with pytest.raises(CheckpointError, match="refused"):
        read_pieces(iteration_folder(Path(root), 1), pieces, group=group)


def test_a_malicious_listing_is_refused(tmp_path: Path) -> None:
    run_ranks(2, write_one, str(tmp_path), 1)
    (iteration_folder(tmp_path, 1) / ".metadata").write_bytes(pickle.dumps(Evil()))
    run_ranks(2, read_evil, str(tmp_path))
    assert not Path("/tmp/should-not-exist-evil").exists()


def read_wrong(rank: int, world: int, root: str, what: str) -> None:
    group = dist.new_group(backend="gloo")
    tensors = full_tensors()
    if what == "missing":
        tensors["model.extra.weight"] = torch.zeros(3)
    else:
        tensors["model.norm.weight"] = torch.zeros(6)
    with pytest.raises(CheckpointError, match="model.extra" if what == "missing" else "shape"):
        read_pieces(
            iteration_folder(Path(root), 1), make_pieces(tensors.items(), ROWS), group=group
        )


@pytest.mark.parametrize("what", ["missing", "shape"])
def test_names_and_shapes_must_match(tmp_path: Path, what: str) -> None:
    run_ranks(2, write_one, str(tmp_path), 1)
    run_ranks(2, read_wrong, str(tmp_path), what)


def one_rank_fails(rank: int, world: int, root: str) -> None:
    group = dist.new_group(backend="gloo")
    write_one(rank, world, root, 1)
    if rank == 1:

        def broken(self, *args, **kwargs):
            raise OSError(28, "No space left on device")

        checkpoint_io.ChecksumWriter.write_data = broken  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="rank 1.*No space left"):
        write_one(rank, world, root, 2)
    dist.barrier(group)
    assert latest_iteration(Path(root)) == (1, None)
    assert not list(Path(root).glob(".saving_*"))


def test_a_full_disk_on_one_rank_reaches_all(tmp_path: Path) -> None:
    run_ranks(2, one_rank_fails, str(tmp_path))


def no_room(rank: int, world: int, root: str) -> None:
    """Stored bytes: the vocabulary without padding, and chunks of several ranks once."""
    needed = VOCAB * 6 * 8 + (70 + 5 + 1) * 4 + checkpoint_io.SPACE_RESERVE
    with pytest.MonkeyPatch.context() as patch:
        for free in (needed - 1, needed):
            usage = SimpleNamespace(free=free)
            patch.setattr(directory.shutil, "disk_usage", lambda path, usage=usage: usage)
            if free < needed:
                with pytest.raises(CheckpointError, match="GB free"):
                    write_one(rank, world, root, 2)
                assert latest_iteration(Path(root)) == (None, None)
            else:
                write_one(rank, world, root, 2)


def test_space_is_checked_before_a_save(tmp_path: Path) -> None:
    run_ranks(4, no_room, str(tmp_path))
    assert latest_iteration(tmp_path) == (2, None)


def background(rank: int, world: int, root: str) -> None:
    saver_group = dist.new_group(backend="gloo")
    tensors = full_tensors()
    saver = CheckpointSaver(Path(root), group=saver_group, background=True)
    original = checkpoint_io.ChecksumWriter.write_data

    def slow(self, *args, **kwargs):
        time.sleep(0.5)
        return original(self, *args, **kwargs)

    checkpoint_io.ChecksumWriter.write_data = slow  # type: ignore[method-assign]
    saver.save(1, make_pieces(tensors.items(), ROWS), {"iteration": 1})
    for tensor in tensors.values():
        tensor.add_(1)
    assert latest_iteration(Path(root))[0] is None
    value = torch.ones(4)
    for _ in range(20):
        dist.all_reduce(value)
        value /= world
    assert torch.equal(value, torch.ones(4))
    saver.wait()
    assert latest_iteration(Path(root)) == (1, None)
    read_pieces(
        iteration_folder(Path(root), 1), make_pieces(tensors.items(), ROWS), group=saver_group
    )
    for name, tensor in full_tensors().items():
        limit = VOCAB if name.endswith("embedding.weight") else None
        assert torch.equal(
            tensors[name][:limit] if limit else tensors[name], tensor[:limit] if limit else tensor
        )

    def broken(self, *args, **kwargs):
        raise OSError("disk on fire")

    if rank == 0:
        checkpoint_io.ChecksumWriter.write_data = broken  # type: ignore[method-assign]
    saver.save(2, make_pieces(tensors.items(), ROWS), {"iteration": 2})
    for _ in range(100):
        if saver.failure():
            break
        time.sleep(0.1)
    assert "disk on fire" in str(saver.failure())
    with pytest.raises(CheckpointError, match="disk on fire"):
        saver.wait()


def test_background_save_is_a_snapshot_beside_training(tmp_path: Path) -> None:
    run_ranks(2, background, str(tmp_path))


def test_the_background_thread_works_on_its_ranks_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = CheckpointSaver(tmp_path, group=None, background=True)  # type: ignore[arg-type]
    chosen: list[tuple[str, int]] = []
    monkeypatch.setattr(saver, "own", lambda: None)
    monkeypatch.setattr(saver, "_write", lambda *args: chosen.append(("written", args[0])))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3 if in_main_thread() else 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(("gpu", device)))
    saver.save(7, {}, {})
    saver.wait()
    assert chosen == [("gpu", 3), ("written", 7)]


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def choose(rank: int, world: int, root: str) -> None:
    group = dist.new_group(backend="gloo")
    assert choose_checkpoint(Path(root), iteration=None, group=group) == (4, None)
    assert choose_checkpoint(Path(root), iteration=1, group=group) == (1, None)
    with pytest.raises(CheckpointError, match=r"--ckpt-step 3 .*\[1, 4\]"):
        choose_checkpoint(Path(root), iteration=3, group=group)


def test_choosing(tmp_path: Path) -> None:
    run_ranks(2, write_one, str(tmp_path), 1)
    run_ranks(2, write_one, str(tmp_path), 4)
    run_ranks(2, choose, str(tmp_path))


@pytest.mark.parametrize("name", [".metadata", "state.json"])
def test_checksums_speak_of_what_is_believed(tmp_path: Path, name: str) -> None:
    run_ranks(2, write_one, str(tmp_path), 1)
    folder = iteration_folder(tmp_path, 1)
    files = directory.read_checksums(folder)
    files.pop(name)
    directory.write_checksums(folder, files)
    messages = run_ranks(2, expect_damage, str(tmp_path), f"doesn't speak of {name}")
    assert "ranks 0, 1: " in messages[0] and messages[0].count(name) == 1


def test_damaged_checksum_file_means_incomplete(tmp_path: Path) -> None:
    run_ranks(2, write_one, str(tmp_path), 1)
    path = iteration_folder(tmp_path, 1) / "checksums.json"
    record = json.loads(path.read_text())
    first = sorted(record["files"])[0]
    record["files"][first]["crc32"] ^= 1
    path.write_text(json.dumps(record))
    assert not directory.is_complete(iteration_folder(tmp_path, 1))
    with pytest.raises(CheckpointError, match="says 1, .*its own checksum does not match"):
        latest_iteration(tmp_path)
