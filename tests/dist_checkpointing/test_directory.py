"""Which checkpoint is the latest, what pruning leaves, and who owns the folder; no ranks."""

import dataclasses
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import checkpoint_io, directory, owner
from megatron.core.dist_checkpointing.directory import (
    CHECKSUM_FILE,
    POINTER,
    complete_iterations,
    iteration_folder,
    latest_iteration,
    prune,
    write_checksums,
    write_pointer,
)
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.owner import Owner


def checkpoints(root: Path, *iterations: int) -> Path:
    """Whole checkpoints with one small file; the last one is pointed to."""
    for iteration in iterations:
        folder = iteration_folder(root, iteration)
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(b"data")
        write_checksums(folder, {"data": (directory.file_crc32(folder / "data")[0], 4)})
        write_pointer(root, iteration)
    return root


def damage(root: Path, iteration: int) -> None:
    os.truncate(iteration_folder(root, iteration) / "data", 2)


def test_a_broken_latest_falls_back_and_never_forward(tmp_path: Path) -> None:
    """Set back from 8 to 4, saved 5, and 5 is broken: 6 and 8 are of the abandoned past."""
    checkpoints(tmp_path, 2, 4, 6, 8, 5)
    damage(tmp_path, 5)
    iteration, warning = latest_iteration(tmp_path)
    assert iteration == 4
    assert warning is not None and "says 5" in warning and "checkpoint, 4, of those" in warning
    assert "data has 2 bytes instead of 4" in warning
    for below in (2, 4):
        damage(tmp_path, below)
    with pytest.raises(
        CheckpointError, match=r"nor is there one that led to it.*\[6, 8\].*--ckpt-step"
    ):
        latest_iteration(tmp_path)
    for above in (6, 8):
        damage(tmp_path, above)
    with pytest.raises(CheckpointError, match="nor is there any other; put a whole one back"):
        latest_iteration(tmp_path)


@pytest.mark.parametrize("pointer", [None, b"", b"\xff\x00", b"-1", "٣".encode(), "folder"])
def test_without_a_usable_pointer_the_newest_counts(tmp_path: Path, pointer: object) -> None:
    checkpoints(tmp_path, 2, 4, 6)
    damage(tmp_path, 6)
    path = tmp_path / POINTER
    path.unlink()
    if pointer == "folder":
        path.mkdir()
    elif isinstance(pointer, bytes):
        path.write_bytes(pointer)
    iteration, warning = latest_iteration(tmp_path)
    assert iteration == 4
    assert warning is not None and "unusable; taking the newest whole checkpoint, 4" in warning
    for number in (2, 4):
        damage(tmp_path, number)
    if pointer is None:
        assert latest_iteration(tmp_path) == (None, None)
    else:
        with pytest.raises(CheckpointError, match="no whole checkpoint in"):
            latest_iteration(tmp_path)


def test_what_a_run_was_set_back_from_is_not_its_past(tmp_path: Path) -> None:
    """From 8 back to 4, then 5 and 9: 6 and 8 lie below 9 but didn't lead to it."""
    for number in (2, 4, 6, 8):
        checkpoints(tmp_path, number)
        directory.add_to_past(tmp_path, number)
    directory.begin_past(tmp_path, 4)
    assert directory.past_iterations(tmp_path, 8) == [6, 4, 2], "the pointer still says 8"
    for number in (5, 9):
        checkpoints(tmp_path, number)
        directory.add_to_past(tmp_path, number)
    assert directory.past_iterations(tmp_path, 9) == [5, 4, 2]
    damage(tmp_path, 9)
    iteration, warning = latest_iteration(tmp_path)
    assert iteration == 5 and warning is not None
    shutil.rmtree(iteration_folder(tmp_path, 9))
    checkpoints(tmp_path, 9)
    assert prune(tmp_path, 3, 9) == [2, 6, 8]
    for number in (4, 5, 9):
        damage(tmp_path, number)
    checkpoints(tmp_path, 7)
    write_pointer(tmp_path, 9)
    with pytest.raises(CheckpointError, match=r"the others, \[7\].*--ckpt-step"):
        latest_iteration(tmp_path)
    directory.begin_past(tmp_path, 0)
    assert directory.past_iterations(tmp_path, 9) == [7, 5, 4]
    directory.add_to_past(tmp_path, 9)
    assert directory.past_iterations(tmp_path, 9) == []
    (tmp_path / directory.PAST_FILE).write_bytes(b"{")
    assert directory.past_iterations(tmp_path, 9) == [7, 5, 4]


def test_pruning_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    base = checkpoints(tmp_path / "base", 2)
    root = checkpoints(tmp_path / "run", 4, 6)
    iteration_folder(root, 2).symlink_to(iteration_folder(base, 2))
    assert prune(root, 1, 6) == [2, 4]
    assert complete_iterations(root) == [6] and not os.path.lexists(iteration_folder(root, 2))
    assert complete_iterations(base) == [2]


@pytest.mark.parametrize("leads", ["somewhere", "nowhere"])
def test_publishing_over_a_link_leaves_what_it_leads_to(tmp_path: Path, leads: str) -> None:
    base = checkpoints(tmp_path / "base", 2)
    root = checkpoints(tmp_path / "run", 2)
    saving = directory.saving_folder(root, 2, "token")
    iteration_folder(root, 2).rename(saving)
    target = iteration_folder(base, 2 if leads == "somewhere" else 3)
    iteration_folder(root, 2).symlink_to(target)
    directory.publish(saving, 2)
    assert complete_iterations(root) == [2] and not iteration_folder(root, 2).is_symlink()
    assert complete_iterations(base) == [2]
    assert not list(root.glob(".saving_*"))


def run_of(token: str, **changes: object) -> Owner:
    other = Owner(token, "elsewhere", 7, time.time(), job_id="77")
    return dataclasses.replace(other, **changes)  # type: ignore[arg-type]


def test_the_newer_run_takes_over_and_the_older_one_learns_who(tmp_path: Path) -> None:
    old, warning = owner.take(tmp_path, run_of("old"))
    assert warning is None
    owner.require(tmp_path, old)
    new, warning = owner.take(tmp_path, run_of("new", job_id="78"))
    assert warning is not None and "job 77, process 7 on elsewhere" in warning
    owner.require(tmp_path, new)
    with pytest.raises(CheckpointError, match="taken over by another run .job 78, process 7"):
        owner.require(tmp_path, old)
    owner.release(tmp_path, old)  # not its to say
    assert owner.read_owner(tmp_path) == new
    assert owner.may_be_written(_leaving(tmp_path, "old"), new)
    assert not owner.may_be_written(_leaving(tmp_path, "older"), new)
    os.utime(_leaving(tmp_path, "old"), (0, 0))
    assert not owner.may_be_written(_leaving(tmp_path, "old"), new)


def _leaving(root: Path, token: str) -> Path:
    folder = directory.saving_folder(root, 3, token)
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("why", ["ended", "long ago", "dead here", "garbage"])
def test_a_run_that_is_gone_is_followed_without_a_warning(tmp_path: Path, why: str) -> None:
    here = {"host": socket.gethostname(), "pid": 2**22 + 1} if why == "dead here" else {}
    old, _ = owner.take(tmp_path, run_of("old", **here))
    path = tmp_path / owner.OWNER_FILE
    if why == "ended":
        owner.release(tmp_path, old)
    elif why == "long ago":
        os.utime(path, (0, time.time() - 2 * owner.RECENT_S))
    elif why == "garbage":
        path.write_bytes(b'{"token": 3')
    new, warning = owner.take(tmp_path, run_of("new"))
    assert warning is None and new.follows == ""
    path.unlink()  # somebody tidied up: the run goes on
    owner.require(tmp_path, new)
    assert owner.read_owner(tmp_path) == new


def test_only_leavings_that_nobody_writes_are_removed(tmp_path: Path) -> None:
    _leaving(tmp_path, "dead")
    (tmp_path / ".saving_link").symlink_to(shutil.copytree(_leaving(tmp_path, "x"), tmp_path / "x"))
    alive = _leaving(tmp_path, "alive")
    mine = directory.saving_folder(tmp_path, 4, "mine")
    directory.open_saving_folder(mine, spared=lambda leaving: leaving == alive)
    assert sorted(tmp_path.glob(".saving_*")) == sorted([alive, mine])
    assert (tmp_path / "x").is_dir()


def test_a_folder_without_its_checksums_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints(tmp_path, 2, 4)
    (iteration_folder(tmp_path, 4) / CHECKSUM_FILE).unlink()
    assert complete_iterations(tmp_path) == [2]


def test_the_pointer_moves_when_the_checkpoint_has_its_name_and_before_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = checkpoints(tmp_path, 2)
    run, _ = owner.take(root, run_of("mine"))
    saving = directory.saving_folder(root, 4, run.token)
    saving.mkdir()
    (saving / "data").write_bytes(b"data")
    pointed = {}

    def noted(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            pointed[name] = latest_iteration(root)
            return original(*args, **kwargs)

        return call

    for name in ("publish", "add_to_past", "prune"):
        monkeypatch.setattr(directory, name, noted(name, getattr(directory, name)))
    files = {"data": directory.file_crc32(saving / "data")}
    checkpoint_io._complete(
        saving, 4, {"iteration": 4}, files, keep=1, run=run, progress=lambda: None
    )
    assert pointed == {"publish": (2, None), "add_to_past": (2, None), "prune": (4, None)}
    assert complete_iterations(root) == [4] and latest_iteration(root) == (4, None)


def test_a_file_that_grew_or_changed_is_named(tmp_path: Path) -> None:
    """A longer file is no whole checkpoint; one of the same size shows in its checksum alone."""
    folder = iteration_folder(checkpoints(tmp_path, 2), 2)
    assert directory.damaged_files(folder, ["data"]) == []
    (folder / "data").write_bytes(b"dota")
    assert directory.is_complete(folder), "contents are not read for this"
    (problem,) = directory.damaged_files(folder, ["data"])
    assert problem.startswith(f"{folder / 'data'} has crc32 ")
    (folder / "data").write_bytes(b"data and more")
    assert directory.missing_parts(folder) == [f"{folder / 'data'} has 13 bytes instead of 4"]
    assert directory.damaged_files(folder, ["data"]) == directory.missing_parts(folder)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    write_pointer(tmp_path, 2)
    monkeypatch.setattr(directory.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_pointer(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == [POINTER]
    assert (tmp_path / POINTER).read_text() == "2\n"
